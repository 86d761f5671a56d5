"""`ReferenceSample`: `Sample` as the reference system has it: ours, with its spellings of fields and methods.

A view is no copy. `viewed` changes the class of a sample in place, so that a hook and the run look at one object, and what
a hook makes itself is a sample of ours from the start.

Source: slime/utils/types.py. What is kept from ours: every length is checked before anything changes.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from slime_core import samples
from slime_core.errors import SampleError
from slime_core.samples import Status

from slime_compat.views.samples.counters import PrefixCacheInfo, SpecInfo

#: Key of `metadata` of a sample whose reward is no number: what the reward returned, for the post-processing. A checkpoint has it so.
ANSWER = "slime_compat_reward"
#: Columns that `append_response_tokens` makes longer.
_GROWING = ("tokens", "loss_mask", "rollout_log_probs")


class ReferenceSample(samples.Sample):
    """One trajectory; `slime.utils.types.Sample`."""

    Status: ClassVar[type[Status]] = Status
    """State of a sample."""

    @property
    def spec_info(self) -> SpecInfo:
        """Counters of speculative decoding."""
        return self._counters("spec_info", SpecInfo)

    @spec_info.setter
    def spec_info(self, value: Mapping[str, int]) -> None:
        self.__dict__["spec_info"] = value

    @property
    def prefix_cache_info(self) -> PrefixCacheInfo:
        """Counters of the engine's prefix cache."""
        return self._counters("prefix_cache_info", PrefixCacheInfo)

    @prefix_cache_info.setter
    def prefix_cache_info(self, value: Mapping[str, int]) -> None:
        self.__dict__["prefix_cache_info"] = value

    def _counters[C: dict[str, int]](self, name: str, kind: type[C]) -> C:
        held = self.__dict__.get(name) or {}
        if not isinstance(held, kind):
            self.__dict__[name] = held = kind(held)
        return held

    @property
    def loss_masks(self) -> Any:
        """The loss mask, as older files call it."""
        return self.loss_mask

    @loss_masks.setter
    def loss_masks(self, value: Any) -> None:
        self.loss_mask = value

    def get_reward_value(self, args: Any) -> Any:
        """Return the reward, or of a dict its entry `args.reward_key`."""
        key = getattr(args, "reward_key", None)
        if (answer := self.metadata.get(ANSWER)) is not None:
            return answer[key] if key and key in answer else answer
        return self.reward if not key else self.reward[key]  # type: ignore[index]  # a dict, as the key says

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Sequence[int],
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append response tokens, with what the engine's `meta_info` says of them.

        Args:
            args: the run's; not read.
            tokens: ids to append.
            log_probs: one a token, of tokens that are trained on; refused for others, but for zeros.
            trainable: whether the loss sees them.
            meta_info: of the engine's answer.
            text: what they spell.
            update_terminal_info: take the status from `meta_info`.

        Raises:
            SampleError: lengths do not agree, or log-probs are missing; the sample is left as it was.
        """
        told = meta_info or {}
        if not trainable and log_probs is not None and not any(log_probs):
            log_probs = None  # zeros, which are put in anyway
        ids = [int(token) for token in tokens]
        if trainable and ids and log_probs is None:
            raise SampleError(
                f"{self.name}: {len(ids)} trainable tokens without log_probs; pass the engine's"
            )
        finish, begin = told.get("finish_reason") or {}, self.response_length
        spans = [span for span in told.get("weight_versions") or () if int(span["start"]) < len(ids)]
        held = {name: getattr(self, name) for name in _GROWING}
        self.append_response(
            ids,
            log_probs=None if log_probs is None else [float(one) for one in log_probs],
            trainable=trainable,
            text=text or "",
            finish_reason=finish.get("type") if update_terminal_info else None,
            weight_version=str(told["weight_version"]) if "weight_version" in told and not spans else None,
            routed_experts=_experts(told, len(self.tokens) + len(ids)),
            top_p_tokens=_top_p(told),
        )
        self.weight_versions += [str(span["version"]) for span in spans]
        self.weight_version_starts += [begin + int(span["start"]) for span in spans]
        self._grow(held)
        if "cached_tokens" in told:
            self.prefix_cache_info.add(told)
        if told.get("spec_verify_ct"):
            self.spec_info.add(told)

    def _grow(self, held: Mapping[str, Any]) -> None:
        """Let columns be the lists that they were, longer, as there: who took one before sees what was appended."""
        for name, before in held.items():
            now = getattr(self, name)
            if type(before) is list and type(now) is list:
                before[:] = now
                setattr(self, name, before)
        if self.loss_mask is None:
            self.loss_mask = [1] * self.response_length

    def strip_last_output_tokens(self, n: int, tokenizer: Any) -> None:
        """Take the last `n` response tokens out again."""
        if n <= 0:
            return
        if n > self.response_length:
            raise SampleError(f"{self.name}: {n} tokens to take out of a response of {self.response_length}")
        self.tokens, self.response_length = self.tokens[:-n], self.response_length - n
        for column in ("loss_mask", "rollout_log_probs", "teacher_log_probs"):
            if getattr(self, column) is not None:
                setattr(self, column, getattr(self, column)[:-n])
        left = self.response_length
        self.environment_spans = [[at, min(end, left)] for at, end in self.environment_spans if at < left]
        if len(self.weight_versions) == len(self.weight_version_starts):
            n_versions = sum(start < left for start in self.weight_version_starts)
            self.weight_versions = self.weight_versions[:n_versions]
            self.weight_version_starts = self.weight_version_starts[:n_versions]
        self.response = tokenizer.decode(list(self.response_tokens)) if self.response_length else ""

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> ReferenceSample:
        """Build a sample of `to_dict`'s output, ours or theirs; keys that are no fields become attributes."""
        known = {name: value for name, value in values.items() if name in cls.__dataclass_fields__}
        sample = viewed(samples.Sample.from_dict(known))
        for name, value in values.items():
            if name not in known:
                setattr(sample, name, value)
        return sample


ReferenceSample.SpecInfo = SpecInfo  # type: ignore[attr-defined]  # names of classes inside the class there, which fields' types hide
ReferenceSample.PrefixCacheInfo = PrefixCacheInfo  # type: ignore[attr-defined]  # as above


def viewed(sample: samples.Sample) -> ReferenceSample:
    """Give a sample the spellings of the reference system, in place; returns it."""
    if not isinstance(sample, ReferenceSample):
        sample.__class__ = ReferenceSample
    assert isinstance(sample, ReferenceSample)
    return sample


def viewed_groups(groups: Iterable[Iterable[samples.Sample]]) -> None:
    """Do so for all samples of groups."""
    for group in groups:
        for sample in group:
            viewed(sample)


def _experts(told: Mapping[str, Any], n_tokens: int) -> Any:
    """Return the experts that an answer of the engine routed tokens to, int32 [tokens - 1, layers * topk]; None without."""
    routed = told.get("routed_experts")
    if isinstance(routed, str):
        routed = np.frombuffer(base64.b64decode(routed), dtype=np.int32).reshape(n_tokens - 1, -1)
    return routed


def _top_p(told: Mapping[str, Any]) -> tuple[Any, Any] | None:
    ids = told.get("top_p_token_ids")
    return None if ids is None else (ids, told["top_p_token_offsets"])
