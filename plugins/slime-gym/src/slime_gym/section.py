"""Settings of the gym source and reward."""

from __future__ import annotations

import re
from typing import Annotated, Any

from annotated_types import Ge, Le
from pydantic import field_validator
from slime_core.config.base import Count, Index, SectionModel

QUESTION = "{question}"
#: What problems are drawn from.
Draw = Annotated[int, Ge(-(2**62)), Le(2**62)]


class GymSection(SectionModel):
    """A reasoning-gym task, and how its questions become prompts."""

    task: str = "chain_sum"
    """Task of reasoning-gym."""
    task_args: dict[str, Any] = {}
    """Options of the task, as its configuration class names them."""
    size: Count = 500
    """Distinct training problems."""
    seed: Draw = 0
    """Seed from which training problems are drawn."""
    eval_size: Index = 100
    """Distinct held-out problems; none of them is trained on."""
    eval_seed: Draw = 1_000_000
    """Seed from which held-out problems are drawn."""
    question_regex: str | None = None
    """Regular expression whose first group is the part of a question to keep; all of it when not given."""
    prompt_template: str = QUESTION
    """Text of the prompt, with `{question}` where the question goes. A problem that one of its lines answers
    is left out."""
    partial: bool = False
    """Give the task's partial scores; otherwise a response scores 1 when it is fully right and 0 when not."""

    @field_validator("prompt_template")
    @classmethod
    def _has_question(cls, value: str) -> str:
        if QUESTION not in value:
            raise ValueError(f"text with {QUESTION} where the question goes")
        return value

    @field_validator("question_regex")
    @classmethod
    def _has_a_group(cls, value: str | None) -> str | None:
        try:
            n_groups = 1 if value is None else re.compile(value).groups
        except re.error as error:
            raise ValueError(f"a regular expression ({error})") from error
        if n_groups < 1:
            raise ValueError("a group: parentheses around the part of the question to keep")
        return value
