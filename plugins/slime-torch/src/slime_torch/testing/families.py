"""Check a model family's decoder against transformers, as the engine runs it: many requests in few slots, and an update between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from slime_core.protocols import SamplingParams
from slime_core.testing.contracts.promises import answering, require
from slime_core.testing.tabular import LetterTokenizer
from slime_models.family.family import ModelFamily
from slime_models.hf.config import read_config
from slime_models.hf.folder import HfCheckpoint
from slime_models.transfer.fingerprint import fingerprint
from torch import Tensor

from slime_torch.generation.request import Request, StopRule
from slime_torch.generation.scheduler import Scheduler
from slime_torch.generation.update import WeightUpdate
from slime_torch.model.decoder import Decoder

#: Nats that a log-prob may be apart in float32.
TOLERANCE = 1e-5
_CPU = torch.device("cpu")
#: Lengths of prompts and of responses. Prompts of one length are the same prompt.
_PROMPTS, _RESPONSES = (20, 3, 12, 12, 1, 20), (24, 9, 16, 30, 12, 5)
_SLOTS, _STEPS_BEFORE_UPDATE = 3, 12


def check_served_family(family: ModelFamily, folder: Path, *, with_kernels: bool = True) -> None:
    """Check what the engine generates with a model of a family, in float32 on a CPU, against transformers.

    Six requests in three slots, two prompts twice: greedy tokens are the likeliest by transformers, log-probs at most 1e-5 apart, and
    in a second round, where weights are updated while requests are in flight, those of the new weights. Where the family has
    windows, they must be shorter than 40 tokens, else the check does not see them.

    Args:
        family: with its decoder, if it brings one.
        folder: a tiny float32 model that transformers wrote, whose logits spread; at least 64 positions.
        with_kernels: whether compiled kernels are used where they can be.

    Raises:
        ContractError: says which promise is broken.
    """
    from transformers import AutoModelForCausalLM

    where = f"family {family.model_type}, engine torch"
    architecture = family.architecture(read_config(folder))
    reference: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    reference.train(False)
    with answering(where, "a decoder"):
        model = Decoder(
            family,
            architecture,
            max_length=64,
            dtype=torch.float32,
            device=_CPU,
            with_kernels=with_kernels,
        )
        model.weights.load(HfCheckpoint(folder))
    scheduler = Scheduler(model, model.create_cache(_SLOTS), max_running=_SLOTS, max_prefill_tokens=40)
    requests = _requests(architecture.vocab_size)
    with answering(where, "tokens"):
        _generate(scheduler, requests)
    for request in requests:
        _compare(where, request, reference, since=0)
    requests = _requests(architecture.vocab_size)
    with answering(f"{where}, before an update", "tokens"):
        scheduler.submit(requests)
        for _ in range(_STEPS_BEFORE_UPDATE):
            scheduler.step()
    since = {request: len(request.tokens) for request in requests if request.finish_reason is None}
    _update(where, scheduler, model, _changed(reference))
    with answering(f"{where}, after an update", "tokens"):
        _generate(scheduler, ())
    for request, n_old in since.items():
        _compare(f"{where}, after an update", request, reference, since=n_old)


def _requests(vocab_size: int) -> list[Request]:
    prompts = {
        length: torch.randint(
            0, vocab_size, (length,), generator=torch.Generator().manual_seed(length)
        ).tolist()
        for length in _PROMPTS
    }
    found = []
    for seed, (length, n) in enumerate(zip(_PROMPTS, _RESPONSES, strict=True)):
        params = SamplingParams(max_new_tokens=n, min_new_tokens=n, temperature=float(seed % 2))
        found.append(Request(prompts[length], params, seed=seed, stop=StopRule(params, LetterTokenizer())))
    return found


def _generate(scheduler: Scheduler, requests: Sequence[Request]) -> None:
    scheduler.submit(requests)
    while scheduler.busy:
        scheduler.step()


@torch.no_grad()
def _changed(reference: Any) -> dict[str, Tensor]:
    """Change all weights of transformers' model a little; returns them under the names of a folder."""
    generator = torch.Generator().manual_seed(1)
    for tensor in reference.parameters():
        tensor.mul_(1 + 0.2 * torch.randn(tensor.shape, generator=generator))
    with TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        return {name: tensor.clone() for name, tensor in HfCheckpoint(Path(folder)).items()}


def _update(where: str, scheduler: Scheduler, model: Decoder, tensors: Mapping[str, Tensor]) -> None:
    """Do what the engine does with the buckets of an update: one tensor a bucket."""
    update = WeightUpdate(model.weights, version="2")
    sent = {name: tensors[name] for name in model.weights.shapes()}
    with answering(f"{where}: an update", "to take every tensor of the folder"):
        for bucket in sent.items():
            update.take([bucket])
        held = update.finish()
    wrong = [name for name, tensor in sent.items() if held[name] != fingerprint(tensor)]
    require(not wrong, f"{where}: an update", found=f"other numbers in {wrong[:3]}", wanted="those sent")
    scheduler.forbid_sharing()
    scheduler.retract()


@torch.inference_mode()
def _compare(where: str, request: Request, reference: Any, *, since: int) -> None:
    """Compare the tokens of a response from `since` on with what transformers gives prompt and response in one pass."""
    ids = torch.tensor([[*request.prompt, *request.tokens]])
    rows = reference(ids).logits[0, len(request.prompt) - 1 + since : -1].float().log_softmax(-1)
    tokens = torch.tensor(request.tokens[since:])
    wanted = rows.gather(1, tokens[:, None]).squeeze(1)
    apart = (torch.tensor(request.log_probs[since:]) - wanted).abs().max().item()
    which = f"{where}: {len(request.prompt)} prompt tokens"
    require(apart <= TOLERANCE, which, found=f"log-probs {apart:.1e} apart", wanted=f"at most {TOLERANCE:g}")
    if request.params.temperature == 0:
        likeliest = rows.argmax(-1).tolist()
        require(
            tokens.tolist() == likeliest,
            which,
            found=f"greedy tokens {tokens.tolist()}",
            wanted=f"{likeliest}",
        )
