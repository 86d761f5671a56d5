"""From a row of data to the prototype of its samples: prompt text, prompt ids, label and metadata."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

from slime_core.data.media import image_of
from slime_core.data.rows.open_rows import Rows
from slime_core.data.rows.record import Record
from slime_core.errors import DataError
from slime_core.files.json_text import parse_json, shown, why_not_json
from slime_core.protocols import IMAGE, Tokenizer
from slime_core.samples import Sample

Messages = list[dict[str, Any]]
#: As `metadata_key`: all columns that no other setting names.
ALL_COLUMNS = "*"


@dataclass(frozen=True, kw_only=True)
class PromptFormat:
    """Which columns hold what, and how a prompt is rendered. Fields are named as in the section `data`."""

    input_key: str = "input"
    label_key: str | None = None
    metadata_key: str = "metadata"
    tool_key: str = "tools"
    multimodal_keys: Mapping[str, str] = field(default_factory=dict)
    media_root: Path | None = None
    apply_chat_template: bool = False
    apply_chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)


class RowPrompts(Sequence[Sample]):
    """Prototypes of the rows of a data set, each built when it is asked for.

    Args:
        rows: of the data set.
        tokenizer: renders and encodes.
        prompt_format: which columns hold what.
        source_name: what `metadata["source_name"]` is to be; the row's own where it is None.
    """

    def __init__(
        self, rows: Rows, tokenizer: Tokenizer, prompt_format: PromptFormat, *, source_name: str | None = None
    ) -> None:
        self._rows, self._tokenizer, self._format = rows, tokenizer, prompt_format
        self._source_name = source_name

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._rows)

    @overload
    def __getitem__(self, number: int) -> Sample: ...
    @overload
    def __getitem__(self, number: slice) -> list[Sample]: ...
    def __getitem__(self, number: int | slice) -> Sample | list[Sample]:
        """Return the prototype of a row, or of several; raises DataError, which names it, where it cannot be one."""
        if isinstance(number, slice):
            return [self[each] for each in range(*number.indices(len(self)))]
        sample = prototype(self._rows[number], self._tokenizer, self._format)
        if self._source_name is not None:
            sample.metadata["source_name"] = self._source_name
        return sample

    def place(self, number: int) -> str:
        """Return where a row stands: `train.jsonl:17`."""
        return self._rows.place(number)

    @property
    def digest(self) -> str:
        """A hash of what the rows are."""
        return self._rows.digest


def build_prompts(
    records: Iterable[Record], tokenizer: Tokenizer, *, prompt_format: PromptFormat
) -> tuple[list[Sample], list[str]]:
    """Turn rows into prototypes, all at once; returns them and where each stands.

    Raises:
        DataError: a row is not what the format says.
    """
    built = [(prototype(record, tokenizer, prompt_format), record.where) for record in records]
    return [sample for sample, _ in built], [place for _, place in built]


def prototype(record: Record, tokenizer: Tokenizer, prompt_format: PromptFormat) -> Sample:
    """Turn one row into a sample whose `tokens` are the prompt ids.

    With `apply_chat_template` the prompt is the rendered text, and a plain string counts as one user message.
    Without it, text is taken as it is, and messages stay messages without ids, for a generator that renders
    them itself.

    Raises:
        DataError: names the row, what it holds and what was wanted.
    """
    metadata = _metadata(record, prompt_format)
    tools = _tools(record, prompt_format.tool_key)
    if tools is not None:
        metadata["tools"] = tools
    prompt = _prompt(record, prompt_format)
    media: dict[str, list[Any]] = {}
    if prompt_format.multimodal_keys:
        root = prompt_format.media_root or record.folder
        prompt, media = _place_media(record, _as_messages(prompt), prompt_format.multimodal_keys, root)
    if prompt_format.apply_chat_template:
        prompt = _render(
            record, tokenizer, _as_messages(prompt), tools, prompt_format.apply_chat_template_kwargs
        )
    tokens = _encoded(record, tokenizer, prompt, media) if isinstance(prompt, str) else []
    if isinstance(prompt, str) and not tokens:
        raise DataError(f"{record.where}: found an empty prompt in {prompt_format.input_key!r}; wanted text")
    return Sample(
        prompt=prompt,
        tokens=list(tokens),
        label=_label(record, prompt_format.label_key),
        metadata=metadata,
        multimodal_inputs=media or None,
    )


def _encoded(
    record: Record, tokenizer: Tokenizer, text: str, media: Mapping[str, Sequence[Any]]
) -> list[int]:
    """Return the ids of a rendered prompt. Only images take places among them; other media are a generator's own matter."""
    if IMAGE not in media:
        try:
            return tokenizer.encode(text)
        except Exception as error:  # tokenizers are programs of their own
            raise DataError(
                f"{record.where}: the tokenizer refuses the prompt ({type(error).__name__}: {error}); wanted text that it knows"
            ) from error
    try:
        return tokenizer.encode_with_images(text, media[IMAGE])
    except DataError as error:
        raise DataError(f"{record.where}: {error}") from error


def _prompt(record: Record, prompt_format: PromptFormat) -> str | Messages:
    key = prompt_format.input_key
    value = record.value(key, setting="input_key")
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(_is_message(item) for item in value):
        return [dict(message) for message in value]
    found = "an empty list" if value == [] else f"{type(value).__name__} {str(value)[:60]!r}"
    raise DataError(
        f"{record.where}: found {found} in {key!r}; wanted text, or a list of messages with role and content"
    )


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and isinstance(item.get("role"), str) and "content" in item


def _as_messages(prompt: str | Messages) -> Messages:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _render(
    record: Record, tokenizer: Tokenizer, messages: Messages, tools: Any, options: Mapping[str, Any]
) -> str:
    try:
        return tokenizer.apply_chat_template(messages, tools=tools, **options)
    except Exception as error:  # templates are programs that models bring along
        raise DataError(
            f"{record.where}: the chat template refuses the prompt ({type(error).__name__}: {error}); "
            "change the messages, the template, or apply_chat_template_kwargs"
        ) from error


def _label(record: Record, key: str | None) -> str | None:
    """Return the label; what is not text is written as JSON (42 becomes "42"), and null is no label."""
    if key is None:
        return None
    value = record.value(key, setting="label_key")
    if value is None or isinstance(value, str):
        return value
    try:
        return json.dumps(value, default=_as_text, allow_nan=False)
    except TypeError as error:
        raise DataError(f"{record.where}: found bytes in {key!r}; wanted a label that is text") from error
    except ValueError as error:
        raise DataError(
            f"{record.where}: found a label that is no finite number; wanted one, or text"
        ) from error


def _as_text(value: Any) -> str:
    """Return what JSON has no form for as text; bytes are none."""
    if isinstance(value, bytes):
        raise TypeError("bytes")
    return str(value)


def check_columns(records: Iterable[Record], prompt_format: PromptFormat) -> None:
    """Refuse the name of an optional column that no row has. Rows may lack one; all of them do where the name is mistyped.

    Raises:
        DataError: names the setting, and the columns that there are.
    """
    wanted = {"metadata_key": prompt_format.metadata_key, "tool_key": prompt_format.tool_key}
    usual = {"metadata_key": PromptFormat.metadata_key, "tool_key": PromptFormat.tool_key}
    missing = {name: key for name, key in wanted.items() if key not in (usual[name], ALL_COLUMNS)}
    if not missing:
        return
    first: Record | None = None
    for record in records:
        first = first or record
        missing = {name: key for name, key in missing.items() if key not in record.values}
        if not missing:
            return
    if first is not None:
        (name, key), *_ = missing.items()
        raise DataError(
            f"{first.where}, and the rows after it: found no column {key!r}, but {sorted(first.values)}; wanted one of them; "
            f"set {name}, or leave it out"
        )


def _metadata(record: Record, prompt_format: PromptFormat) -> dict[str, Any]:
    key = prompt_format.metadata_key
    if key == ALL_COLUMNS:
        others = {prompt_format.input_key, prompt_format.label_key, prompt_format.tool_key}
        names = record.values.keys() - others - {*prompt_format.multimodal_keys.values()}
        return {name: _plain(record, name) for name in sorted(names)}
    value = _parsed(record, key)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise DataError(
            f"{record.where}: found {type(value).__name__} in {key!r}; wanted an object (metadata_key)"
        )
    return dict(value)


def _tools(record: Record, key: str) -> list[Any] | None:
    value = _parsed(record, key)
    if value is None:
        return None
    if not isinstance(value, list):
        raise DataError(f"{record.where}: found {type(value).__name__} in {key!r}; wanted a list (tool_key)")
    if stray := [tool for tool in value if not isinstance(tool, dict)]:
        raise DataError(
            f"{record.where}: found {shown(stray[0])} in {key!r}; wanted a list of objects, one a tool (tool_key)"
        )
    return value


def _parsed(record: Record, key: str) -> Any:
    """Return an optional column's value, read as JSON where it is text; another holds nothing that JSON has no form for."""
    value = record.values.get(key)
    if not isinstance(value, str):
        return _plain(record, key)
    try:
        return parse_json(value)
    except ValueError as error:
        raise DataError(f"{record.where}: found text in {key!r} that is not JSON ({error})") from error


def _plain(record: Record, key: str) -> Any:
    """Return the value of a column that may be missing, and holds nothing that JSON has no form for."""
    value = record.values.get(key)
    if why := why_not_json(value):
        raise DataError(
            f"{record.where}: found {why} in {key!r}; wanted what JSON has: text, finite numbers, lists, tables"
        )
    return value


def _place_media(
    record: Record, messages: Messages, keys: Mapping[str, str], root: Path
) -> tuple[Messages, dict[str, list[Any]]]:
    """Replace each placeholder (`<image>`) in the messages' text by a content part with the next item."""
    media = {kind: _media_items(record, key, kind, root) for kind, key in keys.items()}
    waiting = {kind: iter(items) for kind, items in media.items()}
    split = re.compile("(" + "|".join(f"<{re.escape(kind)}>" for kind in keys) + ")")
    used = dict.fromkeys(keys, 0)
    placed: Messages = []
    for message in messages:
        content = message["content"]
        if isinstance(content, str) and split.search(content):
            parts: list[dict[str, Any]] = []
            for piece in filter(None, split.split(content)):
                kind = piece[1:-1]
                if split.fullmatch(piece):
                    used[kind] += 1
                    parts.append({"type": kind, kind: next(waiting[kind], None)})
                else:
                    parts.append({"type": "text", "text": piece})
            message = {**message, "content": parts}
        placed.append(message)
    for kind, items in media.items():
        if used[kind] != len(items):
            raise DataError(
                f"{record.where}: found {used[kind]} <{kind}> in the prompt and {len(items)} items in "
                f"{keys[kind]!r}; wanted one placeholder for each"
            )
    return placed, {kind: items for kind, items in media.items() if items}


def _media_items(record: Record, key: str, kind: str, root: Path) -> list[Any]:
    value = record.value(key, setting=f"multimodal_keys.{kind}")
    if value is None:
        return []
    items = list(value) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else [value]
    return [image_of(item, where=record.where, root=root) for item in items] if kind == IMAGE else items
