"""Changes of the trainer's settings by which its ranks take less memory, and what they cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from slime_core.config.build import MemoryQuestion
from slime_core.config.derive import num_ranks
from slime_core.protocols.memory import Remedy
from slime_core.run.assemble import algorithm

from slime_megatron.memory.layout import Layout
from slime_megatron.settings.checks import pool_problems
from slime_megatron.settings.derive import shares_optimizer
from slime_megatron.settings.learner_settings import family_of
from slime_megatron.settings.parallel_checks import model_problems, process_problems
from slime_megatron.settings.section import MegatronSection

#: Tokens whose logits are held at once, where they are to be few.
_FEW_LOGITS = 1024
_LEAST_TOKENS = 256


def trainer_remedies(question: MemoryQuestion) -> Sequence[Remedy]:
    """Return what the trainer allows. Shares of time are rules of thumb: none was measured on a GPU."""
    section, settings = question.section(MegatronSection), question.settings
    family, config = family_of(question)
    architecture, ranks = family.architecture(config), num_ranks(settings)
    found = [remedy for remedy in _of_megatron(section, ranks) if remedy is not None]
    allowed = []
    for remedy in found:
        changed = section.model_copy(update={field: value for (_, field), value in remedy.settings.items()})
        problems = [
            *process_problems(changed, ranks),
            *pool_problems(changed, settings),
            *model_problems(changed, architecture, family),
        ]
        if not problems:
            allowed.append(remedy)
    return [*allowed, *_fewer_tokens(question), *_critic_apart(question), *_more_ranks(question)]


def _of_megatron(section: MegatronSection, ranks: int) -> Iterator[Remedy]:
    layout = Layout.of(section, ranks)
    shards = max(layout.optimizer_shards, layout.expert_optimizer_shards)
    if shards > 1 and not shares_optimizer(section, ranks):
        yield _remedy(0.01, use_distributed_optimizer=True)
    if layout.tensor > 1 and not section.sequence_parallel:
        yield _remedy(0.01, sequence_parallel=True)
    if section.log_probs_chunk_size > _FEW_LOGITS:
        yield _remedy(0.05, log_probs_chunk_size=_FEW_LOGITS)
    if section.recompute_granularity != "full":
        yield _remedy(0.33, recompute_granularity="full")
    yield _remedy(0.1, expert_model_parallel_size=2 * layout.experts)
    yield _remedy(0.12, pipeline_model_parallel_size=2 * layout.pipeline)
    yield _remedy(0.15, tensor_model_parallel_size=2 * layout.tensor, sequence_parallel=True)
    yield _remedy(0.3, tensor_model_parallel_size=4 * layout.tensor, sequence_parallel=True)
    yield _remedy(0.6, tensor_model_parallel_size=8 * layout.tensor, sequence_parallel=True)


def _fewer_tokens(question: MemoryQuestion) -> Iterator[Remedy]:
    """Yield halves of the tokens of a micro-batch, as long as the longest sample fits into one."""
    tokens, cost = question.settings.train.max_tokens_per_gpu, 0.0
    least = max(_LEAST_TOKENS, question.longest_sample)
    while (tokens := tokens // 2) >= least:
        cost += 0.04
        yield Remedy(
            flags={"--max-tokens-per-gpu": str(tokens)},
            settings={("train", "max_tokens_per_gpu"): tokens},
            slower=cost,
        )


def _critic_apart(question: MemoryQuestion) -> Iterator[Remedy]:
    """Yield as many ranks for the critic alone as the policy has, where it is among those."""
    settings = question.settings
    if question.device.kind == "cpu" or "critic" in settings.cluster.pools:
        return  # all ranks of a CPU have one memory
    if "values" in algorithm(settings, question.registry).needs:
        value = settings.cluster.actor_num_gpus_per_node
        yield Remedy(
            flags={"--launcher": "ray", "--critic-num-gpus-per-node": str(value)},
            settings={("run", "launcher"): "ray", ("cluster", "critic_num_gpus_per_node"): value},
            slower=0.0,
            wants="as many GPUs for the critic",
        )


def _more_ranks(question: MemoryQuestion) -> Iterator[Remedy]:
    """Yield twice as many machines, or ranks where there is one, which share the optimizer by default."""
    cluster = question.settings.cluster
    field = "actor_num_nodes" if cluster.actor_num_nodes > 1 else "actor_num_gpus_per_node"
    if question.device.kind == "cpu":
        return  # all ranks have one memory
    value = 2 * int(getattr(cluster, field))
    yield Remedy(
        flags={"--launcher": "ray", f"--{field.replace('_', '-')}": str(value)},
        settings={("run", "launcher"): "ray", ("cluster", field): value},
        slower=2.0,
        wants="twice the GPUs",
    )


def _remedy(slower: float, **changes: Any) -> Remedy:
    return Remedy(
        flags={
            f"--{name.replace('_', '-')}": "" if value is True else str(value)
            for name, value in changes.items()
        },
        settings={("megatron", name): value for name, value in changes.items()},
        slower=slower,
    )
