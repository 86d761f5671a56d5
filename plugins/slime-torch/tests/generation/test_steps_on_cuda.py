"""Steps of the scheduler and the sampler for the device cuda, whose tensors have no data: needs no GPU.

Numbers that the host asks for are made up: every drawn token is id 0, its log-prob 0.
"""

from __future__ import annotations

import pytest
import torch
from slime_core.protocols import SamplingParams
from slime_models.testing.cuda_without_device import CUDA, cuda_without_device
from slime_torch.generation.request import Request, StopRule
from slime_torch.generation.sampling import Draws, sample
from slime_torch.generation.scheduler import Scheduler
from slime_torch.model.decoder import Decoder

from ..conftest import CONFIGS, FAMILIES, VOCAB, ByteTokenizer

PARAMS = {
    "temperature 1": {},
    "temperature 0.7": {"temperature": 0.7},
    "greedy": {"temperature": 0.0},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.9},
    "both": {"top_k": 5, "top_p": 0.9},
}
#: Times that the host waits for a draw of all rows: for what was drawn, and under top-p for the number of rows whose cutoff is not
#: among the 64 largest logits.
WAITS = dict.fromkeys(PARAMS, 1) | {"top-p": 2, "both": 2}
RESTRICTED = ("top-k", "top-p", "both")


@pytest.mark.parametrize("with_masks", [False, True], ids=["", "sampling masks"])
@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("name", PARAMS)
def test_the_host_waits_as_often_for_one_row_as_for_many(name, rows, with_masks):
    params = SamplingParams(max_new_tokens=1, **PARAMS[name])
    with cuda_without_device() as counted, torch.inference_mode():
        logits = torch.empty(rows, VOCAB, dtype=torch.bfloat16, device=CUDA)
        draws = Draws.of([params] * rows, range(rows), [7] * rows)
        found = sample(logits, draws, with_sampling_masks=with_masks)
    assert found[0] == rows * [0]
    of_masks = (
        2 if with_masks and name in RESTRICTED else 0
    )  # for the number of ids that are kept, and for them
    assert len(counted.waits) == WAITS[name] + of_masks


def scheduler(kind="qwen3"):
    family = FAMILIES[kind]
    architecture = family.architecture(CONFIGS[kind]().to_dict())
    model = Decoder(family, architecture, max_length=64, dtype=torch.bfloat16, device=CUDA)
    return Scheduler(model, model.create_cache(8), max_running=8, max_prefill_tokens=1000)


def requests(n, **params):
    given = SamplingParams(max_new_tokens=4, **params)
    stop = StopRule(given, ByteTokenizer())
    return [Request([1] * (5 + i), given, seed=i, stop=stop) for i in range(n)]


@pytest.mark.parametrize("n", [1, 5])
def test_the_host_waits_once_for_a_decode_step(n):
    with cuda_without_device() as counted:
        tested = scheduler()
        tested.submit(requests(n))
        waits = []
        for _ in range(4):
            before = len(counted.waits)
            finished = tested.step()
            waits.append(len(counted.waits) - before)
    assert waits == [
        2,
        1,
        1,
        0,
    ]  # the first step prefills, draws, and decodes; the third draws the fourth token
    assert (len(finished), tested.busy) == (0, False)


def test_operations_of_a_draw():
    """Beside those of the model (`test_decoder_on_cuda`); at temperature 1, for any number of rows."""
    found = []
    for rows in (1, 4):
        with cuda_without_device() as counted, torch.inference_mode():
            logits = torch.empty(rows, VOCAB, dtype=torch.bfloat16, device=CUDA)
            before = len(counted.operations)
            sample(logits, Draws.of([SamplingParams(max_new_tokens=1)] * rows, range(rows), [7] * rows))
            found.append(len(counted.operations) - before)
    assert found[0] == found[1] <= 50
