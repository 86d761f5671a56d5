"""Evaluation sets: those of `--eval-prompt-data`, and of `--eval-config` with settings of their own."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le, MinLen
from pydantic import AfterValidator, BeforeValidator, ValidationError

from slime_core.config.base import Amount, Count, FilePath, Index, Positive, SectionModel, Share, Text
from slime_core.config.parsing.words import annotation_of, wanted
from slime_core.config.sections import EvalSection
from slime_core.config.sections.generation import TopK
from slime_core.config.settings import Settings
from slime_core.errors import ConfigError, Problem
from slime_core.files.json_text import is_deep, parse_json, shown, why_not_json
from slime_core.files.strict_read import Unreadable, read_file
from slime_core.plugins.registry import Registry

#: Ending of a file -> what reads its text. Plugins read more (`slime_read_file`).
_READERS: dict[str, Callable[[str], Any]] = {".json": parse_json, ".toml": tomllib.loads}
_WANTED = "a table `eval` with `datasets` and, if you like, `defaults`"


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str | int) else value


def _of_json(table: dict[str, Any]) -> dict[str, Any]:
    if why := why_not_json(table):
        raise ValueError(f"what JSON has, not {why}")
    return table


#: A table that goes into the metadata of samples, or to a chat template.
_Table = Annotated[dict[str, Any], AfterValidator(_of_json)]


class EvalSet(SectionModel):
    """One evaluation set. What it does not give is what the section `eval` says, and then `rollout` or `data`."""

    path: Annotated[FilePath, MinLen(1)]
    """File of its prompts."""
    weight: Positive | None = None
    """Share of the set in the run's accuracy, among the sets, 1 where others have one; all samples count alike where none has."""
    rm_type: str | None = None
    """Reward, by name."""
    custom_rm_path: str | None = None
    """Reward, by `module:function`."""
    custom_generate_function_path: str | None = None
    """Generator."""
    input_key: str | None = None
    """Column of the prompt."""
    label_key: str | None = None
    """Column of the ground truth."""
    tool_key: str | None = None
    """Column of tool schemas."""
    metadata_key: str | None = None
    """Column of further data."""
    multimodal_keys: dict[str, str] | None = None
    """Media type -> column that holds it."""
    apply_chat_template: bool | None = None
    """Render prompts through the chat template."""
    apply_chat_template_kwargs: _Table | None = None
    """Extra arguments of the chat template."""
    metadata_overrides: _Table | None = None
    """What each row's metadata is given besides, and first."""
    n_samples_per_eval_prompt: Count | None = None
    """Samples of each prompt."""
    temperature: Amount | None = None
    """Temperature; 0 is greedy."""
    top_p: Share | None = None
    """Nucleus of the sampling distribution."""
    top_k: TopK | None = None
    """Most likely tokens to sample from; -1 for all."""
    max_response_len: Count | None = None
    """Most tokens of a response."""
    min_new_tokens: Index | None = None
    """Fewest tokens of a response."""
    max_context_len: Count | None = None
    """Most tokens of prompt and response."""
    stop: Annotated[list[Text] | None, BeforeValidator(_listed)] = None
    """Strings that end a response."""
    stop_token_ids: Annotated[list[Index] | None, BeforeValidator(_listed)] = None
    """Token ids that end a response."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the decoded response."""
    no_stop_trim: Literal[True] = True
    """Leave the stop string in the response, which is what always happens."""
    repetition_penalty: Annotated[float, Ge(1), Le(1)] = 1.0
    """Penalty on tokens that came before, which no engine here has."""

    @property
    def reward(self) -> str | None:
        """What chooses its reward; None for the run's."""
        return self.custom_rm_path or self.rm_type


def eval_sets(settings: Settings, registry: Registry) -> dict[str, EvalSet]:
    """Return the evaluation sets by name, those of the file last.

    Args:
        settings: of the run.
        registry: the installed plugins; some read further kinds of files.

    Raises:
        ConfigError: the file cannot be read, or an entry is not one; names it and the key.
    """
    section = settings.eval
    pairs = zip(section.eval_prompt_data[::2], section.eval_prompt_data[1::2], strict=False)
    sets = {name: EvalSet(path=path) for name, path in pairs}
    if section.eval_config is None:
        return sets
    for name, entry in _entries(section.eval_config, _content(section.eval_config, registry)):
        if name in sets:
            raise _wrong(section.eval_config, f"the set {name!r} twice", "each name once")
        sets[name] = _valid(section.eval_config, name, entry)
    return sets


def set_of(metadata: Mapping[str, Any], sets: Mapping[str, EvalSet]) -> EvalSet:
    """Return the evaluation set that the metadata of a sample names; one that says nothing where it names none of `sets`."""
    return sets.get(str(metadata.get("source_name")), EvalSet(path="-"))


def longest_response(own: EvalSet, settings: Settings) -> int:
    """Return the most tokens of a response to a prompt of an evaluation set, by the settings."""
    given = own.max_response_len or settings.eval.eval_max_response_len
    return settings.rollout.rollout_max_response_len if given is None else given


def longest_context(own: EvalSet, settings: Settings) -> int | None:
    """Return the most tokens of prompt and response of an evaluation set, by the settings; None for what the engine takes."""
    return own.max_context_len or settings.eval.eval_max_context_len


def has_sets(section: EvalSection) -> bool:
    """Return whether settings name evaluation sets in files."""
    return bool(section.eval_prompt_data) or section.eval_config is not None


def _content(path: str, registry: Registry) -> Any:
    """Return what a file holds, by its ending."""
    file = Path(path)
    try:
        text = read_file(file).decode("utf-8-sig")
        if file.suffix in _READERS:
            return _READERS[file.suffix](text)
        found = registry.hooks.slime_read_file(path=file)
    except (OSError, ValueError, RecursionError) as error:
        why = getattr(error, "strerror", None) or str(error)
        said = why if isinstance(error, Unreadable) else f"a file that cannot be read ({why})"
        raise _wrong(path, said, "a table of evaluation sets") from error
    if found is None:
        raise _wrong(
            path, f"a file *{file.suffix}", ".toml, .json, or .yaml with slime-compat, which reads it"
        )
    return found


def _entries(path: str, content: Any) -> list[tuple[str, dict[str, Any]]]:
    """Return (name, settings) of each set, the defaults beneath its own."""
    if content == {}:
        raise _wrong(path, "nothing in it", _WANTED)
    if is_deep(content) or not isinstance(content, Mapping):
        raise _wrong(path, shown(content), _WANTED)
    if stray := [key for key in content if key != "eval"]:
        raise _wrong(
            path, f"{shown(stray[0])} at its top, which nothing reads", f"{_WANTED}, and nothing else"
        )
    table = content["eval"]
    if not isinstance(table, Mapping) or not set(table) <= {"defaults", "datasets"}:
        raise _wrong(path, shown(content), _WANTED)
    defaults, datasets = table.get("defaults"), table.get("datasets")
    defaults = {} if defaults is None else defaults
    if not isinstance(defaults, Mapping) or not isinstance(datasets, Mapping | list) or not datasets:
        raise _wrong(path, shown(table), _WANTED)
    if isinstance(datasets, Mapping):
        datasets = [_named(path, name, entry) for name, entry in datasets.items()]
    found: list[tuple[str, dict[str, Any]]] = []
    for entry in datasets:
        if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
            raise _wrong(path, shown(entry), "a data set with a name, which is text, and a path")
        merged = {**defaults, **entry}
        name = merged.pop("name")
        if not name.strip() or not name.isprintable():
            raise _wrong(path, f"the name {name!a}", "one that can be read: gsm8k")
        if any(name == other for other, _ in found):
            raise _wrong(path, f"the set {name!r} twice", "each name once")
        found.append((name, merged))
    return found


def _named(path: str, name: Any, entry: Any) -> dict[str, Any]:
    """Return the entry of a table `datasets` as one of a list."""
    if entry is not None and not isinstance(entry, Mapping):
        wanted = f'a table of its settings: {name} = {{ path = "{name}.jsonl" }}'
        raise ConfigError([Problem(f"eval.eval_config ({path}): datasets.{name}", shown(entry), wanted)])
    return {"name": name, **(entry or {})}


def _valid(path: str, name: str, entry: Mapping[str, Any]) -> EvalSet:
    try:
        return EvalSet.model_validate(entry, strict=True)
    except ValidationError as error:
        raise ConfigError(
            Problem(
                f"eval.eval_config ({path}): {name}.{'.'.join(map(str, one['loc']))}",
                "nothing" if one["type"] == "missing" else shown(one["input"]),
                _said(one),
            )
            for one in error.errors(include_url=False, include_context=False)
        ) from error


def _said(one: Any) -> str:
    """Say in our words what a setting of a set wants, where pydantic refused it."""
    field = EvalSet.model_fields.get(str(one["loc"][0]))
    if field is None:
        return f"one of {', '.join(EvalSet.model_fields)}"
    if one["type"] == "value_error":
        return str(one["msg"]).removeprefix("Value error, ")
    return wanted(annotation_of(field), one["input"])


def _wrong(path: str, found: str, wanted: str) -> ConfigError:
    return ConfigError([Problem(f"eval.eval_config ({path})", found, wanted)])
