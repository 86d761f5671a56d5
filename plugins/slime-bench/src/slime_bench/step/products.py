"""The matrix products that a GRPO step cannot do without, and how long this machine takes for them alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import torch
from slime_models.family.architecture import Architecture
from slime_torch.engine import engine_dtype
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class StepShape:
    """What a step computes."""

    prompts: int
    samples: int
    """Samples of each prompt."""
    prompt_tokens: int
    """Tokens of a prompt, about."""
    new_tokens: int
    """Tokens of each sample's response."""


@torch.inference_mode()
def products_seconds(architecture: Architecture, shape: StepShape) -> float:
    """Return the seconds of a step's matrix products alone, by timing one of each shape and counting.

    Counted are: reading each prompt once, one decoding step of all samples for each new token, and training's forward pass
    and its backward pass, of twice as many products, over each prompt once and each response; the output layer for new tokens
    alone. Attention's own products are not counted. They are measured in bfloat16 where the machine multiplies it fast, in
    float32 elsewhere.
    """
    a, rows = architecture, shape.prompts * shape.samples
    read, learnt = shape.prompts * shape.prompt_tokens, rows * shape.new_tokens
    layer = [
        (a.hidden_size, a.query_size + 2 * a.num_query_groups * a.head_dim),
        (a.query_size, a.hidden_size),
        (a.hidden_size, 2 * a.ffn_hidden_size),
        (a.ffn_hidden_size, a.hidden_size),
    ]
    head = (a.hidden_size, a.vocab_size)
    seconds = 0.0
    for shape_of, times in [*((one, a.num_layers) for one in layer), (head, 1)]:
        is_head = shape_of == head
        seconds += times * shape.new_tokens * _forward(rows, *shape_of)
        seconds += times * _forward(shape.prompts if is_head else read, *shape_of)
        seconds += times * _both(learnt if is_head else read + learnt, *shape_of)
    return seconds


def _forward(rows: int, inputs: int, outputs: int) -> float:
    """Return the seconds of [rows, inputs] x [inputs, outputs]."""
    x, weight = _matrices((rows, inputs), (outputs, inputs))
    return _median(lambda: x @ weight.t())


def _both(rows: int, inputs: int, outputs: int) -> float:
    """Return the seconds of a linear layer's forward product and its two backward ones, in parts of at most 4,096 rows."""
    part = min(rows, 4096)
    x, weight, gradient = _matrices((part, inputs), (outputs, inputs), (part, outputs))

    def all_three() -> None:
        _ = x @ weight.t()
        _ = gradient @ weight
        _ = gradient.t() @ x

    return rows / part * _median(all_three)


def _matrices(*shapes: tuple[int, int]) -> Iterator[Tensor]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return (torch.randn(shape, device=device).to(engine_dtype("auto")) for shape in shapes)


def _median(work: Callable[[], object]) -> float:
    times = []
    for _ in range(4):
        begin = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return median(times[1:])
