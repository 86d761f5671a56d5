"""What holds of every sample, field by field: types, lengths, ranges. Generators, rewards and buffers hand samples over."""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from slime_core.errors import SampleError

if TYPE_CHECKING:
    from slime_core.sample import Sample

#: Nats by which a log-prob may exceed 0: what a softmax in 16 bits gets wrong.
LOG_PROB_SLACK = 1e-2
#: Ids are int32 in batches.
MAX_ID = 2**31 - 1
_TODO = "append tokens with Sample.append_response"


def check_lengths(sample: Sample) -> None:
    """Check that what is one a token is as long as the tokens are.

    Raises:
        SampleError: names the sample, the field, what was found and what was wanted.
    """
    n, total = sample.response_length, len(sample.tokens)
    if not 0 <= n <= total:
        raise SampleError(f"{sample.name}: response_length {n} with {total} tokens in all")
    for name in ("loss_mask", "rollout_log_probs", "teacher_log_probs"):
        values = getattr(sample, name)
        if values is not None and len(values) != n:
            raise SampleError(
                f"{sample.name}: {name} has {len(values)} entries for response_length {n}; {_TODO}"
            )
    offsets = sample.rollout_top_p_token_offsets
    if offsets is not None:
        ids = [] if sample.rollout_top_p_token_ids is None else sample.rollout_top_p_token_ids
        if len(offsets) != n + 1 or offsets[0] != 0 or offsets[-1] != len(ids):
            raise SampleError(
                f"{sample.name}: rollout_top_p_token_offsets must be {n + 1} offsets from 0 to {len(ids)}, "
                f"found {len(offsets)} from {offsets[:1]} to {offsets[-1:]}"
            )
    experts = sample.rollout_routed_experts
    if experts is not None and len(experts) != total - 1:
        raise SampleError(
            f"{sample.name}: rollout_routed_experts has {len(experts)} rows for {total} tokens; wanted {total - 1}"
        )


def check_fields(sample: Sample, *, vocab_size: int | None = None) -> None:
    """Check every field of a sample: about a millisecond for 8,192 tokens.

    Args:
        sample: as a generator, a rollout function or a buffer returned it.
        vocab_size: ids are below it; None where nobody knows.

    Raises:
        SampleError: names the sample, the field, what was found and what was wanted.
    """
    _check_plain(sample)
    most = MAX_ID if vocab_size is None else vocab_size - 1
    _check_ids(sample, "tokens", sample.tokens, most)
    _check_mask(sample)
    for name in ("rollout_log_probs", "teacher_log_probs"):
        _check_log_probs(sample, name, getattr(sample, name))
    _check_nuclei(sample, most)
    _check_routes(sample)
    check_lengths(sample)
    for name in (
        "metadata",
        "train_metadata",
        "apply_chat_template_kwargs",
        "spec_info",
        "prefix_cache_info",
    ):
        _check_json(sample, name)
    for phase, seconds in sample.timings.items():
        if not _is_finite(seconds):
            raise _wrong(sample, f"timings[{phase!r}]", seconds, "finite seconds")
    _check_reward(sample)


#: Field -> the types that it may have, and how a message calls them.
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "index": ((int, type(None)), "an int, or None"),
    "group_index": ((int, type(None)), "an int, or None"),
    "rollout_id": ((int, type(None)), "an int, or None"),
    "prompt": ((str, list), "text, or a list of chat messages"),
    "tokens": ((list,), "a list of ids"),
    "response": ((str,), "text"),
    "response_length": ((int,), "an int"),
    "label": ((str, type(None)), "text, or None"),
    "loss_mask": ((list, type(None)), "a list, or None"),
    "weight_versions": ((list,), "a list of texts"),
    "rollout_log_probs": ((list, type(None)), "a list, or None"),
    "teacher_log_probs": ((list, type(None)), "a list, or None"),
    "remove_sample": ((bool,), "a bool"),
    "multimodal_inputs": ((dict, type(None)), "a dict, or None"),
    "multimodal_train_inputs": ((dict, type(None)), "a dict, or None"),
    "apply_chat_template_kwargs": ((dict,), "a dict"),
    "metadata": ((dict,), "a dict"),
    "train_metadata": ((dict, type(None)), "a dict, or None"),
    "generate_function_path": ((str, type(None)), "text, or None"),
    "custom_rm_path": ((str, type(None)), "text, or None"),
    "session_id": ((str, type(None)), "text, or None"),
    "spec_info": ((dict,), "a dict"),
    "prefix_cache_info": ((dict,), "a dict"),
    "timings": ((dict,), "a dict"),
    "failure": ((str, type(None)), "text, or None"),
}


def _check_plain(sample: Sample) -> None:
    from slime_core.sample import Status

    for name, (types, wanted) in _TYPES.items():
        value = getattr(sample, name)
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise _wrong(sample, name, value, wanted)
        if isinstance(value, str):
            _check_text(sample, name, value)
    if not isinstance(sample.status, Status):
        raise _wrong(sample, "status", sample.status, "a Status, such as Status.COMPLETED")
    if not _is_finite(sample.non_generation_time):
        raise _wrong(sample, "non_generation_time", sample.non_generation_time, "finite seconds")
    for version in sample.weight_versions:
        if not isinstance(version, str):
            raise _wrong(sample, "weight_versions", version, "texts in it")


def _check_text(sample: Sample, name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SampleError(
            f"{sample.name}: {name} has a lone surrogate at {error.start}, {text[error.start]!r}; wanted text that has a "
            "UTF-8 form: decode bytes with errors='replace'"
        ) from None


def _check_ids(sample: Sample, name: str, values: Sequence[Any], most: int) -> None:
    wanted = f"ids, ints from 0 to {most}"
    try:
        if bool in set(map(type, values)):
            raise TypeError
        ids = np.frombuffer(
            array("q", values), dtype=np.int64
        )  # takes integers alone; half the time of np.array
    except (TypeError, OverflowError):
        at = next(i for i, value in enumerate(values) if not _is_id(value, MAX_ID))
        raise _wrong(sample, f"{name}[{at}]", values[at], wanted) from None
    bad = np.flatnonzero((ids < 0) | (ids > most))
    if bad.size:
        raise _wrong(sample, f"{name}[{bad[0]}]", values[bad[0]], wanted)


def _is_id(value: Any, most: int) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and bool(0 <= value <= most)


def _check_mask(sample: Sample) -> None:
    values = sample.loss_mask
    if values is None:
        return
    try:
        data = bytes(values)  # takes integers and bools alone
        if data.count(0) + data.count(1) == len(data):
            return
    except (TypeError, ValueError):
        pass
    for i, value in enumerate(values):
        if not isinstance(value, bool | int | np.integer | np.bool_) or value not in (0, 1):
            raise _wrong(sample, f"loss_mask[{i}]", value, "0 or 1, as an int or a bool")


def _check_log_probs(sample: Sample, name: str, values: Sequence[Any] | None) -> None:
    if not values:
        return
    wanted = "log-probs: finite numbers, at most 0"
    try:
        numbers = np.frombuffer(array("d", values), dtype=np.float64)
    except (TypeError, OverflowError):
        at = next((i for i, value in enumerate(values) if not _is_finite(value)), 0)
        raise _wrong(sample, f"{name}[{at}]", values[at], wanted) from None
    bad = np.flatnonzero(~(np.isfinite(numbers) & (numbers <= LOG_PROB_SLACK)))
    if bad.size:
        raise _wrong(sample, f"{name}[{bad[0]}]", values[bad[0]], wanted)


def _check_nuclei(sample: Sample, most: int) -> None:
    ids, offsets = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
    if ids is None and offsets is None:
        return
    for name, values in (("rollout_top_p_token_ids", ids), ("rollout_top_p_token_offsets", offsets)):
        found = _array_of(values)
        if found is None or found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
            raise _wrong(sample, name, values, "a list or an array of integers")
        if name.endswith("_ids") and found.size and not 0 <= found.min() <= found.max() <= most:
            raise _wrong(sample, name, int(found.max()), f"ids from 0 to {most}, the vocabulary")
        if name.endswith("_offsets") and (np.diff(found) < 0).any():
            raise _wrong(sample, name, values, "offsets that do not fall")


def _check_routes(sample: Sample) -> None:
    experts = sample.rollout_routed_experts
    if experts is None:
        return
    found = _array_of(experts)
    if found is None or found.ndim != 3 or found.dtype.kind not in "iuf" or not _are_counts(found):
        shape = "" if found is None else f" of shape {found.shape} and dtype {found.dtype}"
        wanted = "integers [tokens - 1, num_layers, topk], none below 0"
        raise SampleError(
            f"{sample.name}: rollout_routed_experts is {type(experts).__name__}{shape}; wanted {wanted}"
        )


def _are_counts(values: np.ndarray[Any, Any]) -> bool:
    return not values.size or bool(
        values.min() >= 0 and (values.dtype.kind != "f" or (values % 1 == 0).all())
    )


def _array_of(values: Any) -> np.ndarray[Any, Any] | None:
    try:
        return np.asarray(values)
    except ValueError:  # ragged
        return None


def _check_json(sample: Sample, name: str) -> None:
    try:
        json.dumps(getattr(sample, name), default=_jsonable)
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise SampleError(
            f"{sample.name}: {name} has no JSON form: {error}; keep JSON values, arrays and bytes in it"
        ) from None


def _jsonable(value: Any) -> Any:
    if isinstance(value, bytes) or (
        hasattr(value, "tolist") and str(getattr(value, "dtype", "")) != "object"
    ):
        return None
    raise TypeError(f"{type(value).__module__}.{type(value).__qualname__}")


def _check_reward(sample: Sample) -> None:
    reward = sample.reward
    if reward is None:
        return
    values: Mapping[str, Any] = reward if isinstance(reward, dict) else {"": reward}
    for key, value in values.items():
        if isinstance(value, int | float) and not _is_finite(value):
            what = f"its reward has {value!r} for the part {key!r}"
            told = what if isinstance(reward, dict) else f"reward is {value!r}"
            raise SampleError(f"{sample.name}: {told}, wanted a finite number")
    if isinstance(reward, dict):
        _check_json(sample, "reward")
    elif not isinstance(reward, int | float):
        raise _wrong(sample, "reward", reward, "a finite number, or a dict")


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an int beyond any float
        return False


def _wrong(sample: Sample, where: str, value: Any, wanted: str) -> SampleError:
    try:
        shown = repr(value)[:60]
    except Exception:
        shown = "a value without a repr"
    return SampleError(f"{sample.name}: {where} is {shown} ({type(value).__name__}); wanted {wanted}")
