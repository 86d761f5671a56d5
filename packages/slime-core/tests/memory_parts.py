"""Trainers and engines of which only the memory is known: so many MiB for each token of a micro-batch, and for each prompt."""

from __future__ import annotations

from dataclasses import replace

from slime_core.config.derive import num_ranks
from slime_core.config.factories import EngineFactory, TrainerFactory
from slime_core.protocols.memory import MemoryEstimate, Remedy

MIB = 2**20


def _trained(question):
    settings = question.settings
    tokens = min(
        settings.train.max_tokens_per_gpu, settings.rollout.rollout_batch_size * question.longest_sample
    )
    return [
        MemoryEstimate(
            who="trainer",
            ranks=num_ranks(settings),
            parts={"weights": 100 * MIB, "activations": tokens * MIB},
            host={"reference": 10 * MIB},
            passing=("activations",),
            stays=("weights",),
        )
    ]


def _leaving(question):
    return [replace(each, stays=(), updated=("weights",)) for each in _trained(question)]


def _in_stages(question):
    (found,) = _trained(question)
    return [replace(found, who=f"stage {stage}", ranks=found.ranks // 2) for stage in range(2)]


def _smaller(question):
    tokens = question.settings.train.max_tokens_per_gpu
    return [
        Remedy(
            flags={"--max-tokens-per-gpu": str(tokens // 2)},
            settings={("train", "max_tokens_per_gpu"): tokens // 2},
            slower=0.2,
        ),
        Remedy(
            flags={"--max-tokens-per-gpu": str(tokens // 4)},
            settings={("train", "max_tokens_per_gpu"): tokens // 4},
            slower=0.4,
        ),
        Remedy(
            flags={"--colocate": ""}, settings={("cluster", "colocate"): True}, slower=0.1, wants="patience"
        ),
    ]


def _served(question):
    parts = {"weights": 50 * MIB, "KV cache": question.settings.rollout.rollout_batch_size * MIB}
    first = question.settings.rollout.max_staleness or 0
    return [MemoryEstimate(who="engine", parts=parts, first_device=first, updated=("weights",))]


def _filling(question):
    return [replace(each, fills=0.5) for each in _served(question)]


def _fewer(question):
    prompts = question.settings.rollout.rollout_batch_size // 2
    settings = {("rollout", "rollout_batch_size"): prompts}
    return [Remedy(flags={"--rollout-batch-size": str(prompts)}, settings=settings, slower=0.3)]


def _none(build):
    raise AssertionError("nothing is built")


trainer = TrainerFactory(_none, memory=_trained, remedies=_smaller)
leaving_trainer = TrainerFactory(_none, memory=_leaving)
staged_trainer = TrainerFactory(_none, memory=_in_stages, remedies=_smaller)
engine = EngineFactory(_none, memory=_served, remedies=_fewer)
filling_engine = EngineFactory(_none, memory=_filling, remedies=_fewer)
