"""The buffer `fifo`, whose content is part of a checkpoint, and samples as JSON."""

from __future__ import annotations

import base64
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_core.config.build import BuildContext
from slime_core.errors import CheckpointError, SampleError
from slime_core.samples import Group, Sample
from slime_core.samples.compact import Compact
from slime_core.samples.copies import copied


class FifoBuffer:
    """Groups in the order in which they were put, not copied; satisfies `protocols.Buffer`.

    Args:
        n_samples_per_prompt: executions of the prompt of each group that is restored; None takes any number.
    """

    def __init__(self, n_samples_per_prompt: int | None = None) -> None:
        self._groups: deque[Group] = deque()
        self._n_samples = n_samples_per_prompt

    def __len__(self) -> int:
        """Return the number of groups held."""
        return len(self._groups)

    def put(self, groups: Sequence[Group]) -> None:
        """Add groups at the end.

        Raises:
            SampleError: a group is empty; none is added.
        """
        for position, group in enumerate(groups):
            if not group:
                raise SampleError(f"buffer: group {position} of {len(groups)} is empty; wanted samples")
        self._groups.extend(groups)

    def take(self, n_groups: int) -> list[Group]:
        """Remove and return the `n_groups` oldest groups, or all where there are fewer."""
        return [self._groups.popleft() for _ in range(min(n_groups, len(self._groups)))]

    def state(self) -> dict[str, Any]:
        """Return the whole content, as JSON values.

        Raises:
            CheckpointError: a sample holds a value without a JSON form; names the sample and the field.
        """
        return {"groups": groups_to_json(self._groups)}

    def snapshot(self) -> Callable[[], dict[str, Any]]:
        """Return what makes `state` as it is now, which takes far longer than this: most states are never written."""
        groups = [copied(group) for group in self._groups]
        return lambda: {"groups": groups_to_json(groups)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take on the content that `state` returned, in place of the present one.

        Raises:
            CheckpointError: a group is of another number of samples than this run's.
        """
        groups = groups_from_json(state["groups"])
        for group in groups if self._n_samples is not None else ():
            if (found := len({sample.index for sample in group})) != self._n_samples:
                raise CheckpointError(
                    f"buffer: {group[0].name if group else 'a group'} waits with {found} samples of its prompt, this run "
                    f"has {self._n_samples}; go on with --n-samples-per-prompt {found}"
                )
        self._groups = deque(groups)


def groups_to_json(groups: Iterable[Group]) -> list[list[dict[str, Any]]]:
    """Return groups as JSON values.

    Raises:
        CheckpointError: a sample holds a value without a JSON form; names the sample and the field.
    """
    return [[_sample_to_json(sample) for sample in group] for group in groups]


def groups_from_json(groups: Iterable[Iterable[Mapping[str, Any]]]) -> list[Group]:
    """Return what `groups_to_json` was given."""
    return [[Sample.from_dict(from_json(values)) for values in group] for group in groups]


def create_buffer(build: BuildContext) -> FifoBuffer:
    """Build the buffer `fifo`."""
    return FifoBuffer(build.settings.rollout.n_samples_per_prompt)


def to_json(value: Any) -> Any:
    """Return `value` as JSON values from which `from_json` makes an equal one.

    Beyond JSON's own: compact columns, arrays and numpy scalars (their bytes, in base64), bytes, tuples, NaN and infinity, and
    dicts with other keys than text.

    Raises:
        TypeError: a value of any other type; names it.
    """
    if isinstance(value, np.ndarray | np.generic) and not value.dtype.hasobject and value.dtype.names is None:
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        kind = "__ndarray__" if isinstance(value, np.ndarray) else "__scalar__"
        return {kind: {"dtype": value.dtype.str, "shape": list(value.shape), "data": data}}
    if isinstance(value, float):
        return value if math.isfinite(value) else {"__float__": str(value)}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, list):
        return [to_json(item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and not _DECODERS.keys() & value.keys():
            return {key: to_json(item) for key, item in value.items()}
        return {"__items__": [[to_json(key), to_json(item)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"__tuple__": [to_json(item) for item in value]}
    if isinstance(value, Compact):
        return {"__compact__": [value.typecode, base64.b64encode(value.tobytes()).decode()]}
    if isinstance(value, bytes):
        return {"__bytes__": base64.b64encode(value).decode()}
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__} {str(value)[:40]!r}")


def from_json(value: Any) -> Any:
    """Return what `to_json` was given."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1 and (marker := next(iter(value))) in _DECODERS:
        return _DECODERS[marker](value[marker])
    return {key: from_json(item) for key, item in value.items()}


def _array(form: Mapping[str, Any]) -> NDArray[Any]:
    data = np.frombuffer(base64.b64decode(form["data"]), dtype=form["dtype"])
    return data.reshape(form["shape"]).copy()  # writable, as the original was


#: Form that is not plain JSON, by the one key of the dict that stands for it -> how to read it.
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "__ndarray__": _array,
    "__scalar__": lambda form: _array(form)[()],
    "__bytes__": base64.b64decode,
    "__compact__": lambda form: Compact(form[0], base64.b64decode(form[1])),
    "__float__": float,
    "__tuple__": lambda items: tuple(from_json(item) for item in items),
    "__items__": lambda items: {from_json(key): from_json(item) for key, item in items},
}


def _sample_to_json(sample: Sample) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name, value in sample.to_dict().items():
        try:
            values[name] = to_json(value)
        except TypeError as error:
            raise CheckpointError(
                f"buffer: {sample.name}: {name} holds {error}, which has no JSON form; "
                "keep JSON values, arrays, bytes and tuples in samples that may be resumed"
            ) from None
    return values
