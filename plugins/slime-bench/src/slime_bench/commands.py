"""The benchmarks that need more than slime-core: each says what to install where that is missing."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from slime_core.errors import PluginError


def batches(argv: list[str]) -> int:
    """Measure how fast ranks on Ray get a batch: `slime bench batches`."""
    _need("batches", {"slime_ray": "slime-ray", "ray": "ray"})
    from slime_bench.batches import batches as run

    return run(argv)


def conformance(argv: list[str]) -> int:
    """Compare our algorithms with other frameworks' own code: `slime bench conformance`."""
    _need("conformance", {"torch": "torch", "slime_algos": "slime-algos"})
    from slime_bench.conformance.command import conformance as run

    return run(argv)


def controller(argv: list[str]) -> int:
    """Measure what a step costs beside its engine and its trainer: `slime bench controller`."""
    _need("controller", {"slime_megatron": "slime-megatron"})
    from slime_bench.controller.command import controller as run

    return run(argv)


def engine(argv: list[str]) -> int:
    """Measure the engine `torch` beside transformers and the matrix products alone: `slime bench engine`."""
    _need("engine", {"slime_torch": "slime-torch"})
    from slime_bench.engine.command import main as run

    return run(argv)


def events(argv: list[str]) -> int:
    """Measure what the events of a run cost: `slime bench events`."""
    _need("events", {"slime_megatron": "slime-megatron"})
    from slime_bench.controller.events import events as run

    return run(argv)


def kernels(argv: list[str]) -> int:
    """Measure evaluations of kernels with candidates that misbehave beside clean ones: `slime bench kernels`."""
    _need("kernels", {"slime_kernels": "slime-kernels", "triton": "triton"})
    from slime_bench.kernel_evaluations import kernels as run

    return run(argv)


def memory(argv: list[str]) -> int:
    """Compare the trainer's memory with what is predicted of it: `slime bench memory`."""
    _need("memory", {"slime_megatron": "slime-megatron"})
    from slime_bench.memory_prediction import memory as run

    return run(argv)


def overlap(argv: list[str]) -> int:
    """Measure how much faster loops are that generate beside training: `slime bench overlap`."""
    _need("overlap", {"slime_megatron": "slime-megatron"})
    from slime_bench.overlap import overlap as run

    return run(argv)


def ray_start(argv: list[str]) -> int:
    """Measure how soon `slime train` rolls out on a Ray cluster that is up, beside the launcher local: `slime bench ray-start`."""
    _need(
        "ray-start",
        {
            "slime_ray": "slime-ray",
            "ray": "ray",
            "slime_megatron": "slime-megatron",
            "slime_torch": "slime-torch",
        },
    )
    from slime_bench.ray_start import ray_start as run

    return run(argv)


def streams(argv: list[str]) -> int:
    """Measure what streamed answers of an SGLang server cost: `slime bench streams`."""
    _need("streams", {"slime_sglang": "slime-sglang", "sglang": "sglang"})
    from slime_bench.streams import streams as run

    return run(argv)


def trainer(argv: list[str]) -> int:
    """Measure the Megatron trainer beside transformers: `slime bench trainer`."""
    _need("trainer", {"slime_megatron": "slime-megatron"})
    from slime_bench.trainer.command import trainer as run

    return run(argv)


def weights(argv: list[str]) -> int:
    """Measure weight updates of an SGLang server by each transport: `slime bench weights`."""
    _need("weights", {"slime_sglang": "slime-sglang", "sglang": "sglang"})
    from slime_bench.weights import weights as run

    return run(argv)


def _need(bench: str, modules: Mapping[str, str]) -> None:
    """Check that a benchmark's modules are there.

    Args:
        bench: name of the benchmark.
        modules: module -> distribution that brings it.

    Raises:
        PluginError: one is not; says what to install.
    """
    missing = [home for module, home in modules.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise PluginError(f"slime bench {bench}: needs {', '.join(missing)}; install it")
