"""Which types the fields of a sample may have, and which of the fields a sample of certain types has."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from slime_core.samples.compact import Compact

#: Field -> the types that it may have, and how a message calls them.
TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "index": ((int, type(None)), "an int, or None"),
    "group_index": ((int, type(None)), "an int, or None"),
    "rollout_id": ((int, type(None)), "an int, or None"),
    "prompt": ((str, list), "text, or a list of chat messages"),
    "tokens": ((list, Compact), "a list of ids"),
    "response": ((str,), "text"),
    "response_length": ((int,), "an int"),
    "label": ((str, type(None)), "text, or None"),
    "loss_mask": ((list, Compact, type(None)), "a list, or None"),
    "environment_spans": ((list,), "a list of pairs"),
    "weight_versions": ((list,), "a list of texts"),
    "weight_version_starts": ((list,), "a list of ints"),
    "rollout_log_probs": ((list, Compact, type(None)), "a list, or None"),
    "teacher_log_probs": ((list, Compact, type(None)), "a list, or None"),
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
#: Fields that may be text.
TEXTS = tuple(name for name, (types, _) in TYPES.items() if str in types)
#: Fields that are to have a JSON form.
JSON_FIELDS = ("metadata", "train_metadata", "apply_chat_template_kwargs", "spec_info", "prefix_cache_info")
#: Those whose values are counts.
COUNTERS = ("spec_info", "prefix_cache_info")
#: Columns of tokens that few samples have.
COLUMNS = (
    "loss_mask",
    "teacher_log_probs",
    "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets",
    "rollout_routed_experts",
)


@dataclass(frozen=True)
class GivenFields:
    """Which fields a sample of certain types has, all of them right."""

    texts: tuple[str, ...]
    dicts: tuple[str, ...]
    further_columns: bool
    """Whether it has a column of tokens besides ids and log-probs."""


@functools.lru_cache(maxsize=256)
def given_fields(names: tuple[str, ...], types: tuple[type, ...]) -> GivenFields | None:
    """Return which fields samples of these types have; None where one is of a type that it may not have.

    Samples have few different combinations of types, and to look one up takes less time than to see each field's.
    """
    of = dict(zip(names, types, strict=True))
    if not of.keys() >= TYPES.keys() | set(COLUMNS) or not all(
        issubclass(of[name], wanted) and (of[name] is not bool or bool in wanted)
        for name, (wanted, _) in TYPES.items()
    ):
        return None
    return GivenFields(
        texts=tuple(name for name in TEXTS if issubclass(of[name], str)),
        dicts=tuple(name for name in JSON_FIELDS if issubclass(of[name], dict)),
        further_columns=any(of[name] is not type(None) for name in COLUMNS),
    )
