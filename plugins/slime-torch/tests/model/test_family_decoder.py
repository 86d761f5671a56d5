"""A family's own layers in the engine: a mean of all tokens so far in the place of attention, against a slow loop."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import torch
from slime_core.errors import PluginError
from slime_core.protocols import SamplingParams
from slime_models.family.families.dense import QKV_WEIGHT
from slime_models.family.families.llama import LLAMA
from slime_models.hf.config import read_config
from slime_models.hf.folder import HfCheckpoint
from slime_torch.engine import TorchEngine
from slime_torch.layers.standard import standard_layer
from slime_torch.model.family_decoder import FamilyDecoder, decoder_of
from slime_torch.section import TorchSection
from slime_torch.storage.cache import StateStore

LAYERS = 2


class Means:
    """The kind. Kept of each sequence: the sum of its tokens, and their number."""

    def __init__(self, width, device):
        self.width, self.device = width, device

    def create_store(self, *, page_len, dtype=None):
        parts = [((self.width,), torch.float32), ((1,), torch.float32)]
        return StateStore(LAYERS, parts=parts, device=self.device)

    def begin(self, batch, store):
        return batch, store


class Mean:
    """The part."""

    def __init__(self, builder, number, kind):
        self.kind, self.number = kind, number
        self.output = builder.matrix(f"{builder.layer_prefix(number)}self_attn.o_proj.weight")

    def mix(self, x, now):
        batch, store = now
        sums, counts = store.layers[self.number]
        if batch.prompts is None:
            n = len(x)
            sums[:n] += x
            counts[:n] += 1
            return sums[:n] / counts[:n]
        mixed = torch.empty_like(x)
        for run in batch.prompts.runs:
            added = x[run.tokens].view(run.prompts, run.length, -1).cumsum(1)
            sums[run.slots], counts[run.slots] = added[:, -1], float(run.length)
            mixed[run.tokens] = (added / torch.arange(1.0, run.length + 1, device=x.device)[:, None]).flatten(
                0, 1
            )
        return mixed

    def project(self, mixed, residual):
        product = self.output.linear(mixed)
        return product if residual is None else product + residual


def layers(builder):
    kind = Means(builder.architecture.hidden_size, builder.device)
    return [standard_layer(builder, number, Mean(builder, number, kind)) for number in range(LAYERS)]


MEANS = FamilyDecoder(layers=layers, embedding_scale=lambda architecture: architecture.hidden_size**0.5)
FAMILY = dataclasses.replace(
    LLAMA,
    decoder=f"{__name__}:MEANS",
    rules=tuple(rule for rule in LLAMA.rules if rule is not QKV_WEIGHT),
    ignored=tuple(name for name, _ in QKV_WEIGHT.hf),
)


def log_probs(tensors, tokens, epsilon):
    """Log-probs [len(tokens), vocab_size] of the next token after each, one token after another, in float64."""
    hf = {name: tensors[name].double() for name in tensors}

    def norm(x, name):
        return x / (x.pow(2).mean() + epsilon).sqrt() * hf[name]

    rows, seen = [], [[] for _ in range(LAYERS)]
    for token in tokens:
        x = hf["model.embed_tokens.weight"][token]
        x = x * len(x) ** 0.5
        for number in range(LAYERS):
            prefix = f"model.layers.{number}."
            seen[number].append(norm(x, prefix + "input_layernorm.weight"))
            x = x + hf[prefix + "self_attn.o_proj.weight"] @ torch.stack(seen[number]).mean(0)
            y = norm(x, prefix + "post_attention_layernorm.weight")
            gate, up = (hf[f"{prefix}mlp.{name}_proj.weight"] @ y for name in ("gate", "up"))
            x = x + hf[prefix + "mlp.down_proj.weight"] @ (gate * gate.sigmoid() * up)
        rows.append((hf["lm_head.weight"] @ norm(x, "model.norm.weight")).log_softmax(-1))
    return torch.stack(rows)


@pytest.fixture
def folder(tiny):
    return tiny("llama").folder


def test_what_is_kept_of_a_sequence_follows_it_into_other_slots_and_copies(folder, tokenizer):
    """Three slots for nine requests that end at different times; a prompt comes again while its twin has gone on."""
    prompts = [[5, 6, 7]] * 4 + [[9] * 6, [1, 2], [5, 6, 7], [8], [5, 6, 7]]
    params = [SamplingParams(max_new_tokens=3 + 4 * (i % 3), seed=i) for i in range(9)]

    async def main():
        engine = TorchEngine(
            folder,
            FAMILY,
            tokenizer,
            dtype=torch.float32,
            section=TorchSection(max_running_requests=3),
        )
        await engine.start()
        try:
            return await asyncio.gather(
                *(engine.generate(p, q) for p, q in zip(prompts, params, strict=True))
            )
        finally:
            await engine.close()

    answers = asyncio.run(main())
    tensors, epsilon = HfCheckpoint(folder), read_config(folder)["rms_norm_eps"]
    for prompt, answer in zip(prompts, answers, strict=True):
        rows = log_probs(tensors, [*prompt, *answer.tokens], epsilon)[len(prompt) - 1 : -1]
        wanted = rows.gather(1, torch.tensor(answer.tokens)[:, None]).squeeze(1)
        assert answer.log_probs == pytest.approx(wanted.tolist(), abs=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder": None, "layers": "a:LAYERS"}, "decoder: found none; wanted a FamilyDecoder"),
        ({"decoder": "nowhere:MEANS"}, "nowhere:MEANS cannot be imported: ModuleNotFoundError"),
        ({"decoder": "json:dumps"}, "json:dumps is a function; wanted a FamilyDecoder"),
    ],
)
def test_a_decoder_that_is_none_is_refused(folder, changes, message):
    family = dataclasses.replace(FAMILY, **changes)
    with pytest.raises(PluginError, match=f"model family llama: .*{message}"):
        decoder_of(family, family.architecture(read_config(folder)))
