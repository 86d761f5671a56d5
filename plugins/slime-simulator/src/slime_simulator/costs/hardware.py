"""Costs estimated from the sizes of a model and the data sheet of a GPU, for what was never measured."""

from __future__ import annotations

from dataclasses import dataclass

from slime_simulator.costs.costs import Costs, EngineCosts, TrainerCosts, UpdateCosts

#: Bytes of a weight, and of a number in the KV cache: bfloat16.
_BYTES = 2
#: Shares of the data sheet's figures that kernels reach; assumptions, not measurements.
_BANDWIDTH_SHARE, _DECODE_SHARE, _PREFILL_SHARE, _TRAIN_SHARE = 0.7, 0.5, 0.5, 0.4
#: Seconds of a decode step beside its kernels: scheduling, sampling, launches. An assumption.
_STEP_OVERHEAD_S = 1e-3
#: Bytes a second at which all weights reach the engine. An assumption: published updates are between 5 and 20 GB/s.
_UPDATE_BYTES_S = 10e9


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU by its data sheet."""

    flops: float
    """Operations a second in bfloat16, dense."""
    bytes_s: float
    """Bytes a second of its memory."""


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """What of a model decides its costs."""

    parameters: float
    active: float
    """Parameters that a token uses: fewer than there are in a mixture of experts."""
    kv_bytes: float
    """Bytes of a token in the KV cache: 2 x layers x KV heads x head size x 2."""


#: Source: the vendor's data sheets.
GPUS = {
    "a100": Gpu(flops=312e12, bytes_s=2.04e12),
    "h100": Gpu(flops=989e12, bytes_s=3.35e12),
    "h200": Gpu(flops=989e12, bytes_s=4.8e12),
    "h800": Gpu(flops=989e12, bytes_s=3.35e12),
    "h20": Gpu(flops=148e12, bytes_s=4.0e12),
    "b200": Gpu(flops=2250e12, bytes_s=8.0e12),
}

#: Source: the `config.json` of each model.
MODELS = {
    "qwen2.5-1.5b": ModelSize(parameters=1.54e9, active=1.54e9, kv_bytes=2 * 28 * 2 * 128 * _BYTES),
    "qwen2.5-7b": ModelSize(parameters=7.62e9, active=7.62e9, kv_bytes=2 * 28 * 4 * 128 * _BYTES),
    "qwen2.5-32b": ModelSize(parameters=32.8e9, active=32.8e9, kv_bytes=2 * 64 * 8 * 128 * _BYTES),
    "qwen2.5-72b": ModelSize(parameters=72.7e9, active=72.7e9, kv_bytes=2 * 80 * 8 * 128 * _BYTES),
    "qwen3-30b-a3b": ModelSize(parameters=30.5e9, active=3.3e9, kv_bytes=2 * 48 * 4 * 128 * _BYTES),
    "qwen3-235b-a22b": ModelSize(parameters=235e9, active=22e9, kv_bytes=2 * 94 * 4 * 128 * _BYTES),
}


def estimate(model: ModelSize, gpu: Gpu, *, gpus_per_replica: int, slots: int) -> Costs:
    """Return costs by the roofline: decoding is bound by memory, prefill and training by arithmetic.

    A token takes 2 operations a parameter in a forward pass, and 6 in training; log-probs before the update are one pass more.
    """
    bandwidth = gpus_per_replica * gpu.bytes_s * _BANDWIDTH_SHARE
    flops = gpus_per_replica * gpu.flops
    update_s = model.parameters * _BYTES / _UPDATE_BYTES_S
    return Costs(
        engine=EngineCosts(
            step_s=model.parameters * _BYTES / bandwidth + _STEP_OVERHEAD_S,
            request_s=2 * model.active / (flops * _DECODE_SHARE),
            kv_token_s=model.kv_bytes / bandwidth,
            prefill_token_s=2 * model.active / (flops * _PREFILL_SHARE),
            slots=slots,
        ),
        trainer=TrainerCosts(token_gpu_s=8 * model.active / (gpu.flops * _TRAIN_SHARE), fixed_s=1.0),
        update=UpdateCosts(send_s=update_s, pause_s=update_s, switch_s=update_s / 2),
    )
