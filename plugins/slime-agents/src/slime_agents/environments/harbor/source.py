"""The data source `harbor`: the tasks of a folder, by their instructions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slime_core.config.build import BuildContext
from slime_core.data.prompt_source import PromptSource, source_of
from slime_core.data.prompts import PromptFormat, build_prompts
from slime_core.data.rows.record import Record
from slime_core.errors import ConfigError, Problem

from slime_agents.environments.harbor.environment import HARBOR
from slime_agents.environments.harbor.task import read_task, task_folders


def create_source(build: BuildContext) -> PromptSource:
    """Build the data source `harbor`: every task folder below `prompt_data`, in order of their paths; evaluations take them all, too.

    A prompt is a task's instruction, through the chat template if `apply_chat_template`; `metadata["harbor"]` names its folder.

    Raises:
        ConfigError: `prompt_data` is not one folder.
        DataError: it has no task, or a task is not what Harbor's format says.
    """
    data = build.settings.data
    if len(data.prompt_data) != 1:
        wanted = "the folder that holds the task folders"
        raise ConfigError([Problem("data.prompt_data", repr(data.prompt_data), wanted)])
    prompt_format = PromptFormat(
        input_key="prompt",
        apply_chat_template=data.apply_chat_template,
        apply_chat_template_kwargs=data.apply_chat_template_kwargs,
    )
    root = Path(data.prompt_data[0])
    records = _records(root, as_chat=data.apply_chat_template)
    prototypes, places = build_prompts(records, build.tokenizer, prompt_format=prompt_format)
    if build.evaluation:
        for sample in prototypes:
            sample.metadata["source_name"] = root.name
    return source_of(prototypes, build, place=places.__getitem__)


def _records(root: Path, *, as_chat: bool) -> Iterator[Record]:
    for folder in task_folders(root):
        text = read_task(folder).instruction
        prompt = [{"role": "user", "content": text}] if as_chat else text
        yield Record(str(folder), {"prompt": prompt, "metadata": {HARBOR: str(folder.absolute())}})
