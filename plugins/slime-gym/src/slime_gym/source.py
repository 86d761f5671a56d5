"""The data source over a task's problems."""

from __future__ import annotations

from typing import Any

from slime_core.config.build import BuildContext
from slime_core.config.sections import DataSection
from slime_core.data.prompt_source import PromptSource, refuse_prompt_data, source_of
from slime_core.errors import DataError
from slime_core.protocols import Tokenizer
from slime_core.samples import Sample

from slime_gym.problems import ORIGIN_KEY, GymProblem, held_out_problems, training_problems
from slime_gym.section import QUESTION, GymSection


def create_source(build: BuildContext) -> PromptSource:
    """Build the data source `gym`: the training problems; when `build.evaluation`, the held-out ones, in order.

    `label` is the task's answer, `metadata["gym"]` where the reward finds the problem again, and, for evaluation,
    `metadata["source_name"]` the task.

    Raises:
        ConfigError: files of prompts are given.
        DataError: the task has too few problems, or `rollout_max_prompt_len` leaves none to train on.
    """
    refuse_prompt_data(build)
    section, data = build.section(GymSection), build.settings.data
    if build.evaluation:
        prototypes = [
            _prototype(problem, section, data, build.tokenizer, {"source_name": section.task})
            for problem in held_out_problems(section)
        ]
        return source_of(prototypes, build)
    prototypes = [
        _prototype(problem, section, data, build.tokenizer, {}) for problem in training_problems(section)
    ]
    if data.rollout_max_prompt_len is not None:
        prototypes = _not_longer(prototypes, data.rollout_max_prompt_len)
    return source_of(prototypes, build)


def _prototype(
    problem: GymProblem,
    section: GymSection,
    data: DataSection,
    tokenizer: Tokenizer,
    metadata: dict[str, Any],
) -> Sample:
    text = section.prompt_template.replace(QUESTION, problem.question)
    if data.apply_chat_template:
        messages = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(messages, **data.apply_chat_template_kwargs)
    return Sample(
        prompt=text,
        tokens=tokenizer.encode(text),
        label=problem.answer,
        metadata={ORIGIN_KEY: problem.origin.to_dict(), **metadata},
    )


def _not_longer(prototypes: list[Sample], limit: int) -> list[Sample]:
    kept = [sample for sample in prototypes if len(sample.tokens) <= limit]
    if not kept:
        shortest = min(len(sample.tokens) for sample in prototypes)
        raise DataError(
            f"data.rollout_max_prompt_len: all {len(prototypes)} gym prompts have more than {limit} tokens, "
            f"the shortest {shortest}; raise the limit"
        )
    return kept
