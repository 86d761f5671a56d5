"""Setups that other projects publish figures of, as scenarios: what is theirs, what had to be assumed, and what it is compared with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from slime_core.config.load import load_settings
from slime_core.plugins.registry import Registry

from slime_simulator.costs.costs import Costs, TrainerCosts, UpdateCosts
from slime_simulator.costs.fit import scaled
from slime_simulator.costs.hardware import GPUS, MODELS, estimate
from slime_simulator.costs.traces import Lognormal
from slime_simulator.scenario import Scenario
from slime_simulator.simulation import Cluster


@dataclass(frozen=True, kw_only=True)
class Side:
    """One of the two runs of a comparison."""

    name: str
    flags: tuple[str, ...]
    costs: Costs
    cluster: Cluster


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A published comparison."""

    title: str
    published: str
    """The ratio that is claimed, and where."""
    trace: Lognormal
    flags: tuple[str, ...]
    before: Side
    after: Side
    explains: str
    """What the two differ in, and what the simulation leaves out."""


def _verl() -> Preset:
    """Return verl's comparison on 128 GPUs, calibrated on its synchronous run alone (generation 177.85 s, step 356.30 s).

    Not published, and assumed: the lengths, up to the limit of 28K tokens and about 2K in the mean, as this model's are. The engine is
    1.4 times as fast as the estimate, with which generation takes what is published. The trainer: on 16, 32 and 64 GPUs of its own `update_actor` takes
    269.80, 156.98 and 113.16 s, which is 61 s and 3,342 GPU-seconds within 5%; on all 128 it takes 113.81 s, and old log-probs
    53.92 s.
    """
    estimated = estimate(MODELS["qwen2.5-7b"], GPUS["h20"], gpus_per_replica=1, slots=256)
    engine = scaled(estimated, engine=1.4, trainer=1.0).engine
    trace = Lognormal(median=1200, p99=12000, longest=28 * 1024, prompt=200)
    tokens = 512 * 16 * 2150  # of a step: the trace's mean
    shared = TrainerCosts(fixed_s=61.0 + 53.92, token_gpu_s=128 * (113.81 - 61.0) / tokens)
    apart = TrainerCosts(fixed_s=61.0, token_gpu_s=3342 / tokens)
    update = UpdateCosts(send_s=5.5, pause_s=5.5, switch_s=2.5)
    return Preset(
        title="verl, Qwen2.5-Math-7B, DAPO, 128 H20, 512 x 16 responses",
        published="2.35 to 2.67 of the total time; 356.30 / 150.63 s = 2.37 a step (verl, docs/advance/fully_async.md)",
        trace=trace,
        flags=(
            "--rollout-batch-size",
            "512",
            "--n-samples-per-prompt",
            "16",
            "--rollout-max-response-len",
            "28672",
        ),
        before=Side(
            name="sync, 128 shared",
            flags=("--loop", "sync", "--colocate"),
            costs=Costs(engine=engine, trainer=shared, update=update),
            cluster=Cluster(replicas=128, trainer_gpus=128),
        ),
        after=Side(
            name="fully-async, 64 + 64",
            flags=("--loop", "fully-async", "--max-staleness", "4", "--rollout-in-completion-order"),
            costs=Costs(engine=engine, trainer=apart, update=update),
            cluster=Cluster(replicas=64, trainer_gpus=64),
        ),
        explains="Shared, every step waits for its longest response while most replicas have nothing left, computes old "
        "log-probs (53.9 s; the asynchronous run takes those of the rollout), and trains no faster on 128 GPUs than on 64 "
        "(113.8 and 113.2 s). Apart, a step takes little more than its training, as long as the engine keeps up: with a mean "
        "of 3.7K tokens (20K at most) it does not, and the ratio is 1.8. verl's trainer waits 33 s a step for samples, which "
        "is not seen here; it bounds how many samples are old, and not how old each is.",
    )


def _laminar() -> Preset:
    """Return a comparison of the size of Laminar's largest: model, batch, lengths and costs are assumed, none is fitted."""
    flags = (
        "--rollout-batch-size",
        "512",
        "--n-samples-per-prompt",
        "16",
        "--rollout-max-response-len",
        "16384",
    )
    model, gpu = MODELS["qwen2.5-7b"], GPUS["h800"]
    costs = estimate(model, gpu, gpus_per_replica=1, slots=256)
    trainer = TrainerCosts(fixed_s=10.0, token_gpu_s=costs.trainer.token_gpu_s)
    shared = Costs(
        engine=costs.engine, trainer=trainer, update=UpdateCosts(send_s=5.0, pause_s=5.0, switch_s=5.0)
    )
    relayed = Costs(engine=costs.engine, trainer=trainer, update=UpdateCosts(send_s=0.5, pause_s=0.5))
    return Preset(
        title="Laminar, 7B, 1,024 H800, 512 x 16 responses of up to 16K tokens",
        published="up to 5.48 over verl, colocated and synchronous: arXiv 2510.12633",
        trace=Lognormal(median=2000, p99=20000, longest=16384, prompt=300),
        flags=flags,
        before=Side(
            name="sync, 1,024 shared",
            flags=("--loop", "sync", "--colocate"),
            costs=shared,
            cluster=Cluster(replicas=1024, trainer_gpus=1024),
        ),
        after=Side(
            name="fully-async, 512 + 512",
            flags=("--loop", "fully-async", "--max-staleness", "4", "--rollout-in-completion-order"),
            costs=relayed,
            cluster=Cluster(replicas=512, trainer_gpus=512),
        ),
        explains="At 1,024 GPUs a synchronous step of 8 responses a GPU is the time of its longest response, whatever the number "
        "of GPUs; asynchronous, the longest responses overlap with later steps. Laminar has each replica fetch weights when it "
        "likes and moves the longest responses together; both are here only as cheap updates.",
    )


#: Name -> what builds it.
PRESETS: dict[str, Callable[[], Preset]] = {"verl-128": _verl, "laminar-1024": _laminar}


def scenarios(preset: Preset, registry: Registry, *, steps: int) -> dict[str, Scenario]:
    """Return the two runs of a comparison."""
    found = {}
    for side in (preset.before, preset.after):
        words = ["--hf-checkpoint", "simulated", "--num-rollout", str(steps), *preset.flags, *side.flags]
        settings = load_settings([], words, registry=registry)
        found[side.name] = Scenario(
            settings=settings, costs=side.costs, cluster=side.cluster, trace=preset.trace
        )
    return found
