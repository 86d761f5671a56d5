"""The stage of `scripts/gpu_proof` that times decoding steps of the engine `torch`, of two shapes of models whose weights are random."""

from __future__ import annotations

import math
import statistics
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpu_stages import Stage

#: As Qwen/Qwen3-8B, beside the 0.6B of `slime bench trainer`.
QWEN3_8B = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32, "tie_word_embeddings": False,
}  # fmt: skip
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 16, "vocab_size": 300}  # fmt: skip
PROMPT_LEN, N_NEW = 58, 128


def decode_steps(stage: Stage) -> dict[str, Any]:
    """Decoding steps of 0.6B and 8B shapes at 64 and 256 requests, beside what reading the weights for each allows."""
    from slime_bench.random_work import SHAPES

    bytes_per_s = copied_bytes_per_s(stage)
    found: dict[str, Any] = {"memory_bytes_per_s": bytes_per_s}
    for name, config in (("0.6b", SHAPES["0.6b"]), ("8b", SHAPES["0.6b"] | QWEN3_8B)):
        model = random_model(stage, config | (TINY if stage.dry else {}))
        weights = model.dtype.itemsize * sum(map(math.prod, model.weights.shapes().values()))
        if not model.architecture.tie_word_embeddings:
            weights -= model.embedding.tensor.nbytes  # of which a step reads some rows
        found[name] = {"weight_bytes": weights}
        for n in (2, 4) if stage.dry else (64, 256):
            figures = timed(model, n)
            limit = n * bytes_per_s / weights
            figures |= {"limit_tokens_per_s": limit, "share_of_limit": figures["step_tokens_per_s"] / limit}
            found[name][str(n)] = figures
        stage.aim(
            f"share of what reading the weights allows, {name}, least requests",
            next(each["share_of_limit"] for each in found[name].values() if isinstance(each, dict)),
            at_least=0.5,
        )
        del model
    return found


def copied_bytes_per_s(stage: Stage) -> float:
    """Return how many bytes a copy on the device reads and writes in a second."""
    import torch

    source = torch.ones((1 << 22) if stage.dry else (1 << 31), dtype=torch.bfloat16, device=stage.device)
    target = torch.empty_like(source)
    target.copy_(source)
    stage.wait()
    begin = time.perf_counter()
    for _ in range(10):
        target.copy_(source)
    stage.wait()
    return 10 * 2 * source.nbytes / (time.perf_counter() - begin)


def random_model(stage: Stage, config: dict[str, Any]) -> Any:
    """Return a decoder whose weights are drawn on the device."""
    import torch
    from slime_models.family.families.qwen3 import QWEN3
    from slime_torch.model.decoder import Decoder

    model = Decoder(
        QWEN3,
        QWEN3.architecture(config),
        max_length=256,
        dtype=torch.float32 if stage.dry else torch.bfloat16,
        device=torch.device(stage.device),
    )
    for name, shape in model.weights.shapes().items():
        drawn = torch.ones if name.endswith("norm.weight") else torch.randn
        model.weights.write({name: 0.02 * drawn(shape, device=stage.device)})
    return model


def timed(model: Any, n: int) -> dict[str, Any]:
    """Let `n` requests run, twice; return figures of the second time."""
    import torch
    from slime_core.protocols import SamplingParams
    from slime_torch.generation.recorded_steps import RecordedSteps
    from slime_torch.generation.request import Request, StopRule
    from slime_torch.generation.scheduler import Scheduler

    class NoText:
        eos_token_id = None

    cache = model.create_cache(n, max_len=PROMPT_LEN + N_NEW)
    steps = RecordedSteps(model, cache, max_running=n)
    scheduler = Scheduler(model, cache, max_running=n, max_prefill_tokens=16384, steps=steps)
    params = SamplingParams(max_new_tokens=N_NEW, min_new_tokens=N_NEW)
    seconds: list[float] = []
    vocab = model.architecture.vocab_size
    with torch.inference_mode():
        for _ in range(2):
            seconds = []
            prompts = ([(7 * i + j) % vocab for j in range(PROMPT_LEN)] for i in range(n))
            stop: Any = StopRule(params, NoText())  # type: ignore[arg-type]
            scheduler.submit([Request(prompt, params, seed=1, stop=stop) for prompt in prompts])
            while scheduler.busy:
                begin = time.perf_counter()
                scheduler.step()
                seconds.append(time.perf_counter() - begin)
    median = statistics.median(seconds)
    return {
        "step_ms": 1e3 * median,
        "step_tokens_per_s": n / median,
        "tokens_per_s": n * N_NEW / sum(seconds),
        "first_step_ms": 1e3 * seconds[0],
    }
