"""Real servers of two tensor-parallel ranks with models other than llamas: their own weights, and those of updates."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from slime_core.protocols import SamplingParams
from slime_core.weights.sync import sync_weights
from slime_models.hf.folder import HfCheckpoint
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from ..sender import Sender

pytestmark = [pytest.mark.faults, pytest.mark.proves("{served}", "sglang"), pytest.mark.timeout(1200)]

VOCAB = 130
PROMPT = [5, 6, 7, 129]
GREEDY = SamplingParams(max_new_tokens=12, temperature=0)
SIZE = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 256, "initializer_range": 0.2, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "dtype": "float32",
}  # fmt: skip
#: A context of 8 tokens, stretched; transformers and the trainer read `attention_factor`, SGLang the other one, 1 / (0.1 ln 4 + 1).
YARN = {
    "rope_type": "yarn", "rope_theta": 1e3, "factor": 4.0, "original_max_position_embeddings": 8, "attention_factor": 1.0,
    "attn_factor": 0.8782488562869419,
}  # fmt: skip
#: Gate and up as one matrix in folders (glm4), biases (qwen2), norms of queries and keys and YaRN (qwen3), a folder with code (mimo).
FAMILIES = {
    "glm4": {"head_dim": 32},
    "qwen2": {},
    "qwen3": {"head_dim": 32, "rope_parameters": YARN},
    "mimo": {},
}
#: Families that transformers has no class for: the one whose decoder is theirs, and the code that comes with their folders.
DECODERS = {"mimo": "qwen2"}
MIMO_CODE = """
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config

class MiMoConfig(Qwen2Config):
    model_type = "mimo"
"""


class Model:
    """A random model of a family: transformers' own, and its tensors as its folder has them."""

    def __init__(self, family, seed, folder):
        torch.manual_seed(seed)
        config = AutoConfig.for_model(DECODERS.get(family, family), **SIZE, **FAMILIES[family])
        self.module = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for parameter in self.module.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter) * 0.2)
        self.folder = folder / str(seed)
        self.module.save_pretrained(self.folder)
        words = WordLevel({f"t{i}": i for i in range(VOCAB)}, unk_token="t0")
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="t0")
        tokenizer.save_pretrained(self.folder)
        if family == "mimo":
            (self.folder / "configuration_mimo.py").write_text(MIMO_CODE)
            file = self.folder / "config.json"
            own = {"model_type": "mimo", "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 0}
            own |= {"auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"}}
            file.write_text(json.dumps(json.loads(file.read_text()) | own))


@pytest.fixture(scope="module", params=FAMILIES)
def served(request, served_by_flags, tmp_path_factory):
    """A server, and a function that makes the models of seeds, of which it has the first."""
    folder = tmp_path_factory.mktemp(f"sglang-{request.param}")
    flags = {
        "rollout-num-gpus-per-engine": 2,
        "sglang-max-total-tokens": 1024,
        "sglang-max-running-requests": 4,
    }
    first = Model(request.param, 0, folder)
    switches = ["--sglang-trust-remote-code"] if request.param in DECODERS else []
    for serving in served_by_flags(first.folder, folder, flags, *switches):
        yield serving, lambda seed: Model(request.param, seed, folder)


@torch.no_grad()
def check_serves(ranks, model):
    answer = ranks.run(ranks.engine.generate(PROMPT, GREEDY))
    exact = copy.deepcopy(model.module).double()
    logits = exact(torch.tensor([PROMPT + answer.tokens])).logits
    rows = logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    assert answer.tokens == rows.argmax(-1).tolist()
    wanted = rows.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
    assert answer.log_probs == pytest.approx(wanted.tolist(), abs=1e-5, rel=0)


def test_after_updates_both_ranks_serve_the_newest_model(served):
    ranks, model_of = served
    check_serves(ranks, model_of(0))
    for seed, transport in ((1, "memory"), (2, "disk-delta")):
        model = model_of(seed)
        sender = Sender(dict(HfCheckpoint(model.folder)))
        ranks.run(sync_weights(sender, ranks.engine, version=str(seed), timeout_s=240, transport=transport))
        check_serves(ranks, model)
