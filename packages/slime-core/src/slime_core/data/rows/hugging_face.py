"""Rows of a Hugging Face dataset: a folder, or a name on the hub, by the library `datasets`."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import os
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from slime_core.data.rows.parquet import checked
from slime_core.data.rows.record import Record
from slime_core.errors import DataError, Problem

#: What the names of datasets begin with in settings: `hf:openai/gsm8k?config=main&split=train`.
PREFIX = "hf:"
_OPTIONS = ("config", "split", "revision")
_MISSING = "the library datasets: install slime-core[datasets]"


class DatasetRows:
    """Rows of a dataset; satisfies `open_rows.Rows`. The library maps them from the disk.

    Args:
        name: as settings spell it.
        dataset: a `datasets.Dataset`.
        folder: that paths in rows begin in.
        begin: number of the first row in the dataset as it was.
    """

    def __init__(self, name: str, dataset: Any, folder: Path, begin: int) -> None:
        self._name, self._dataset, self._folder, self._begin = name, dataset, folder, begin

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._dataset)

    def place(self, number: int) -> str:
        """Return dataset and row, which counts from 1."""
        return f"{self._name}:row {self._begin + number + 1}"

    def __getitem__(self, number: int) -> Record:
        """Read a row.

        Raises:
            DataError: it holds what a row of JSON may not hold; names it.
        """
        return checked(Record(self.place(number), dict(self._dataset[number]), self._folder))

    @property
    def digest(self) -> str:
        """The library's own fingerprint of the table and of what was done to it, and the number of rows."""
        return f"{self._dataset._fingerprint}:{self._begin}:{len(self)}"


def dataset_problem(name: str) -> Problem | None:
    """Return what is wrong with the name of a dataset before it is read; None where nothing is."""
    place, _, problem = _split(name)
    if problem is not None:
        return problem
    if importlib.util.find_spec("datasets") is None:
        return Problem(name, "a Hugging Face dataset", _MISSING)
    if place.startswith((".", "/", "~")) and not os.path.isdir(place):
        return Problem(name, "no such folder", "a folder that datasets wrote, or a name on the hub")
    return None


def open_dataset(name: str, rows: slice) -> DatasetRows:
    """Return the rows of one split of a dataset: of a folder that `save_to_disk` wrote, a folder of data files, or of the hub.

    Args:
        name: `hf:PLACE?config=...&split=...&revision=...`; `split` is `train` where it is not given.
        rows: which of them.

    Raises:
        DataError: the library is missing, cannot read it, or there is no such split.
    """
    place, options, _ = _split(name)
    split = options.pop("split", "train")
    try:
        library = importlib.import_module("datasets")
    except ImportError as error:
        raise DataError(f"{name}: found {error}; wanted {_MISSING}") from error
    try:
        if _is_saved(place):
            found = library.load_from_disk(place)
            dataset = found[split] if hasattr(found, "keys") else found
        else:
            dataset = library.load_dataset(
                place, options.get("config"), split=split, revision=options.get("revision")
            )
    except Exception as error:  # of the library, of a hub, of a script
        raise DataError(
            f"{name}: datasets cannot read the split {split!r} of it ({type(error).__name__}: {str(error)[:300]})"
        ) from error
    for column, feature in dataset.features.items():
        if (as_stored := _undecoded(feature)) != feature:
            dataset = dataset.cast_column(column, as_stored)
    begin, end, _ = rows.indices(len(dataset))
    whole = (begin, end) == (0, len(dataset))
    part = dataset if whole else dataset.select(range(begin, max(begin, end)))
    return DatasetRows(name, part, Path(place) if os.path.isdir(place) else Path(), begin)


def _undecoded(feature: Any) -> Any:
    """Return the type of a column whose media are what the files hold: decoded they are objects of other libraries."""
    if isinstance(feature, dict):
        return type(feature)({key: _undecoded(value) for key, value in feature.items()})
    if isinstance(feature, list):
        return [_undecoded(each) for each in feature]
    if hasattr(feature, "decode"):
        return dataclasses.replace(feature, decode=False)
    if hasattr(feature, "feature"):
        return dataclasses.replace(feature, feature=_undecoded(feature.feature))
    return feature


def _split(name: str) -> tuple[str, dict[str, str], Problem | None]:
    place, _, query = name.removeprefix(PREFIX).partition("?")
    options = dict(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(options.keys() - set(_OPTIONS))
    problem = None
    if unknown or not place:
        problem = Problem(
            name, repr(unknown) if unknown else "no name", f"{PREFIX}NAME?config=...&split=...&revision=..."
        )
    return place, options, problem


def _is_saved(place: str) -> bool:
    return any(os.path.isfile(os.path.join(place, file)) for file in ("dataset_dict.json", "state.json"))
