"""The data source `verifiers`: the tasks of a taskset written for verifiers v1."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from slime_core.config.build import BuildContext
from slime_core.data.prompt_source import PromptSource, refuse_prompt_data, source_of
from slime_core.data.prompts import PromptFormat, build_prompts
from slime_core.data.rows.record import Record
from slime_core.errors import ConfigError, DataError, Problem

from slime_rm.adapters.taskset import LoadedTaskset
from slime_rm.adapters.verifiers import ROW_KEY
from slime_rm.section import VerifiersSection

_LABEL = "answer"
"""Where most tasksets have the right answer; `slime check` looks at it, and nothing else."""


def create_source(build: BuildContext) -> PromptSource:
    """Build the data source `verifiers`: a taskset's tasks; when `build.evaluation`, its first `eval_size`.

    With `apply_chat_template` a task's system prompt and messages go through the chat template; without, a prompt must
    be text, and there may be no system prompt.

    Raises:
        ConfigError: a taskset without end, and no size; an evaluation of no tasks; or files of prompts are given.
        DataError: there are no tasks left, a prompt does not fit, or all are too long.
    """
    refuse_prompt_data(build)
    section, data = build.section(VerifiersSection), build.settings.data
    taskset = LoadedTaskset(section.taskset, section.taskset_args)
    prompt_format = PromptFormat(
        input_key="prompt",
        label_key="label",
        apply_chat_template=data.apply_chat_template,
        apply_chat_template_kwargs=data.apply_chat_template_kwargs,
    )
    if build.evaluation:
        if section.eval_size == 0:
            wanted = "how many of the taskset's tasks to hold out"
            raise ConfigError([Problem("verifiers.eval_size", "0", wanted, "give --verifiers-eval-size")])
        held_out = itertools.islice(_records(taskset, data.apply_chat_template), section.eval_size)
        prototypes, places = build_prompts(held_out, build.tokenizer, prompt_format=prompt_format)
        for sample in prototypes:
            sample.metadata["source_name"] = taskset.name
        return source_of(prototypes, build, place=places.__getitem__)
    if taskset.endless and section.size is None:
        problem = Problem("verifiers.size", "nothing", "how many tasks to train on", "give --verifiers-size")
        raise ConfigError([problem])
    stop = None if section.size is None else section.eval_size + section.size
    records = itertools.islice(_records(taskset, data.apply_chat_template), section.eval_size, stop)
    prototypes, places = build_prompts(records, build.tokenizer, prompt_format=prompt_format)
    return source_of(prototypes, build, place=places.__getitem__)


def _records(taskset: LoadedTaskset, as_chat: bool) -> Iterator[Record]:
    for number, row in enumerate(taskset.rows()):
        where = f"{taskset.name}: task {number}"
        messages = taskset.messages(row)
        yield Record(
            where,
            {
                "prompt": messages if as_chat else _text(messages, where),
                "label": row.get(_LABEL),
                "metadata": {ROW_KEY: row},
            },
        )


def _text(messages: list[dict[str, Any]], where: str) -> str:
    if len(messages) != 1 or not isinstance(messages[0]["content"], str):
        raise DataError(f"{where}: its prompt is a conversation; set apply_chat_template")
    return messages[0]["content"]
