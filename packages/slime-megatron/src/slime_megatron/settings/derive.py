"""What follows from the trainer's settings and the number of its ranks. Imports neither torch nor megatron."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from slime_megatron.settings.section import MegatronSection

#: Fields of `TokenView` with logits of the whole vocabulary.
LOGITS = frozenset({"logits", "sequence_logits"})
#: Models that are not trained, by the names of their weights.
Frozen = Literal["ref", "teacher"]


def frozen_models(needs: Collection[str], *, has_teacher: bool) -> tuple[Frozen, ...]:
    """Return which frozen models estimator and loss read.

    Args:
        needs: optional fields of `TokenView` that they read.
        has_teacher: whether there is a folder of a teacher; without it samples carry its log-probs.
    """
    read: dict[Frozen, bool] = {
        "ref": "ref_log_probs" in needs,
        "teacher": has_teacher and "teacher_log_probs" in needs,
    }
    return tuple(name for name, is_read in read.items() if is_read)


def shares_optimizer(section: MegatronSection, n_ranks: int) -> bool:
    """Return whether ranks with the same weights share the optimizer's state: AdamW's, if there are two such ranks.

    And one that is offloaded to the host, as Megatron wants it.
    """
    if section.use_distributed_optimizer is not None:
        return section.use_distributed_optimizer
    tensor, pipeline = section.tensor_model_parallel_size, section.pipeline_model_parallel_size
    cut = tensor * pipeline
    expert_cut = (
        (section.expert_tensor_parallel_size or tensor) * pipeline * section.expert_model_parallel_size
    )
    return offloads_optimizer(section) or (
        section.optimizer == "adam" and n_ranks // min(cut, expert_cut) > 1
    )


def offloads_optimizer(section: MegatronSection) -> bool:
    """Return whether the optimizer's state is on the host, and its steps are taken there: `--optimizer-cpu-offload`."""
    return bool(section.megatron_args.get("optimizer_cpu_offload"))
