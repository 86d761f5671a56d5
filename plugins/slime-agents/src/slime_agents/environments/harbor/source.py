"""The data source `harbor`: the tasks of a folder, by their instructions."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from slime_core.config.build import BuildContext
from slime_core.data.prompt_source import PromptSource, refuse_prompt_data, source_of
from slime_core.data.prompts import PromptFormat, build_prompts
from slime_core.data.rows.record import Record
from slime_core.errors import ConfigError, Problem
from slime_core.samples import Sample

from slime_agents.environments.harbor.environment import HARBOR
from slime_agents.environments.harbor.task import read_task, task_folders


def create_source(build: BuildContext) -> PromptSource:
    """Build the data source `harbor`: every task folder below `prompt_data`, in order of their paths; for evaluation those below each
    folder of `eval_prompt_data`, whose name is `metadata["source_name"]`, of each the first `eval_num_prompts`.

    A prompt is a task's instruction, through the chat template if `apply_chat_template`; `metadata["harbor"]` names its folder.

    Raises:
        ConfigError: `prompt_data` is not one folder, or `eval_prompt_data` not names and folders in turn.
        DataError: a folder has no task, or a task is not what Harbor's format says.
    """
    data = build.settings.data
    prompt_format = PromptFormat(
        input_key="prompt",
        apply_chat_template=data.apply_chat_template,
        apply_chat_template_kwargs=data.apply_chat_template_kwargs,
    )
    most = build.settings.eval.eval_num_prompts if build.evaluation else None
    prototypes: list[Sample] = []
    places: list[str] = []
    for name, folder in _folders(build).items():
        records = islice(_records(Path(folder), as_chat=data.apply_chat_template), most)
        samples, where = build_prompts(records, build.tokenizer, prompt_format=prompt_format)
        if build.evaluation:
            for sample in samples:
                sample.metadata["source_name"] = name
        prototypes += samples
        places += where
    return source_of(prototypes, build, place=places.__getitem__)


def _folders(build: BuildContext) -> dict[str, str]:
    """Return the folders that hold task folders, by name."""
    words = build.settings.data.prompt_data
    if not build.evaluation:
        if len(words) != 1:
            wanted = "the folder that holds the task folders"
            raise ConfigError([Problem("data.prompt_data", repr(words), wanted)])
        return {"": words[0]}
    refuse_prompt_data(build, but=("eval_prompt_data", "eval_num_prompts"))
    words = build.settings.eval.eval_prompt_data
    folders = dict(zip(words[::2], words[1::2], strict=False))
    if not words or 2 * len(folders) != len(words):
        wanted = "a name and the folder that holds the task folders to evaluate on, each name once"
        todo = "give --eval-prompt-data held-out FOLDER"
        raise ConfigError([Problem("eval.eval_prompt_data", repr(words), wanted, todo)])
    return folders


def _records(root: Path, *, as_chat: bool) -> Iterator[Record]:
    for folder in task_folders(root):
        text = read_task(folder).instruction
        prompt = [{"role": "user", "content": text}] if as_chat else text
        yield Record(str(folder), {"prompt": prompt, "metadata": {HARBOR: str(folder.absolute())}})
