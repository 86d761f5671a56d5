"""Settings of rewards that ask a server, and of verifiers; each is also an option in `rm_args`."""

from __future__ import annotations

from typing import Any

from slime_core.config.base import Count, Index, SectionModel


class RmSection(SectionModel):
    """Servers that rewards and the sample hook `teacher` ask."""

    rm_url: str | None = None
    """Where the reward `remote_rm` posts samples."""
    reward_model_url: str | None = None
    """Server of the model that the reward `reward_model` asks, such as `http://localhost:30000`; `served:NAME` is a
    model that the run itself serves (`--sglang-config`)."""
    judge_url: str | None = None
    """Base of the OpenAI-compatible server that the reward `judge` asks, such as `http://localhost:30000/v1`, or
    `served:NAME/v1` for a model that the run itself serves."""
    judge_model: str | None = None
    """Model that the reward `judge` asks for."""
    opd_teacher_url: str | None = None
    """SGLang server of the teacher whose log-probs the sample hook `teacher` asks for, such as `http://localhost:30000`;
    `served:NAME` is a model that the run itself serves."""


class VerifiersSection(SectionModel):
    """A taskset of verifiers, for the source and the reward `verifiers`."""

    taskset: str | None = None
    """Id of the taskset: the name of the installed module that exports it."""
    taskset_args: dict[str, Any] = {}
    """Options of the taskset, as its configuration class names them."""
    size: Count | None = None
    """Most tasks that are trained on; all when not given, which a taskset without end does not allow."""
    eval_size: Index = 0
    """Tasks at the beginning that are held out for evaluation, and not trained on."""
