"""`Sample`: one trajectory, from its prompt to its reward.

Fields and their names follow the reference system's `Sample` (slime/utils/types.py). We differ in four ways:
nothing here imports torch; ragged arrays are numpy or plain lists; `append_response` checks every length
before it changes anything; and unknown keys are an error in `from_dict` instead of becoming attributes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from slime_core.errors import SampleError
from slime_core.samples.compact import FLOAT32, IDS, MASK, Compact, Floats, Ints, joined
from slime_core.samples.status import STATUS_OF_FINISH, Status
from slime_core.samples.validation import check_fields, check_lengths


@dataclass(kw_only=True)
class Sample:
    """One trajectory: prompt, response, what scored it, and what the trainer needs of it.

    `tokens` holds prompt and response ids; every per-token response field (`loss_mask`,
    `rollout_log_probs`, `teacher_log_probs`) has `response_length` entries and lines up with the tail of
    `tokens`.
    """

    index: int | None = None
    """Id of this sample, unique over the whole run but for the samples that one execution fans out into, which share it."""
    group_index: int | None = None
    """Id of the prompt group, unique over the whole run."""
    rollout_id: int | None = None
    """Id of the execution; samples that one execution fans out into share it. None means one per sample."""

    prompt: str | list[dict[str, Any]] = ""
    """Rendered text, or the raw chat messages."""
    tokens: Ints = field(default_factory=list)
    """Prompt ids followed by response ids. This and the other columns of a response are lists, or columns that behave as
    lists in a tenth of the memory (`Compact`) if an engine gives such."""
    response: str = ""
    """Decoded response."""
    response_length: int = 0
    """Number of response tokens, trainable or not."""
    label: str | None = None
    """Ground truth, as the reward wants it."""
    reward: float | dict[str, Any] | None = None
    """The score, or a dict of scores from which `reward_key` picks one, `score` when it is not given."""
    loss_mask: Ints | None = None
    """1 where a response token is trained on, else 0. None means all ones."""
    environment_spans: list[list[int]] = field(default_factory=list)
    """[begin, end) in the response of each part that was put in (by a tool, an environment) and not generated, oldest first. Each
    ends a turn of the policy, also one of no tokens."""
    weight_versions: list[str] = field(default_factory=list)
    """Engine weight version of each generation call, oldest first; of one that weights arrived in, each version."""
    weight_version_starts: list[int] = field(default_factory=list)
    """Where in the response the tokens of each of `weight_versions` begin. Tokens that are put in count for the turn before them."""
    rollout_log_probs: Floats | None = None
    """Log-prob (nats) that the engine gave each response token; 0.0 on tokens it did not generate."""
    teacher_log_probs: Floats | None = None
    """Log-prob (nats) of each response token under a teacher, for on-policy distillation."""
    rollout_top_p_token_ids: Any = None
    """Integers: the ids that top-p and top-k left to draw each response token from, concatenated."""
    rollout_top_p_token_offsets: Any = None
    """Integers [response_length + 1], the first 0: offsets into `rollout_top_p_token_ids`. A token without ids could have
    been any, or was not generated."""
    rollout_routed_experts: Any = None
    """Integers [len(tokens) - 1, num_layers, topk]: the experts that the engine routed each token to. Dropped when
    generated tokens are appended without new ones; those that are put in repeat the last row, until the engine reads them."""
    status: Status = Status.PENDING
    """Where the sample stands."""
    remove_sample: bool = False
    """Keep the sample in its group's statistics, but train on none of its tokens."""

    multimodal_inputs: dict[str, Any] | None = None
    """Raw images, videos and audio for the engine."""
    multimodal_train_inputs: dict[str, Any] | None = None
    """Processor arrays for the trainer."""
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Extra arguments of the chat template for this sample."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """The data row's metadata and anything that user code adds."""
    train_metadata: dict[str, Any] | None = None
    """Data for a custom loss; it travels to the trainer with the sample."""
    generate_function_path: str | None = None
    """Generator for this sample alone."""
    custom_rm_path: str | None = None
    """Reward for this sample alone."""
    session_id: str | None = None
    """Key by which a router keeps the calls of one trajectory on one engine."""

    non_generation_time: float = 0.0
    """Seconds spent in tools and environments."""
    spec_info: dict[str, int] = field(default_factory=dict)
    """Counters of speculative decoding, over this sample's requests: of tokens `spec_draft_token_num` that were proposed and
    `spec_accept_token_num` of them that were right, `spec_verify_ct` passes, and `completion_token_num` that these gave."""
    prefix_cache_info: dict[str, int] = field(default_factory=dict)
    """Prefix cache counters: `cached_tokens`, `total_prompt_tokens`."""
    timings: dict[str, float] = field(default_factory=dict)
    """Seconds spent per phase (`generate`, `reward`), and what the engine measured over this sample's requests
    (`e2e_latency`, `queue_time`, `first_token_latency`)."""
    failure: str | None = None
    """Why the sample FAILED."""

    @property
    def name(self) -> str:
        """How messages name this sample: `sample 17`."""
        return f"sample {'?' if self.index is None else self.index}"

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens."""
        return len(self.tokens) - self.response_length

    @property
    def response_tokens(self) -> Ints:
        """Response ids."""
        return self.tokens[len(self.tokens) - self.response_length :]

    @property
    def turn_begin(self) -> int:
        """Where in the response the newest turn of the policy begins."""
        return self.environment_spans[-1][1] if self.environment_spans else 0

    @property
    def environment_length(self) -> int:
        """Number of response tokens that were put in, and not generated."""
        return sum([end - begin for begin, end in self.environment_spans])

    @property
    def generated_length(self) -> int:
        """Number of response tokens that the policy generated, trained on or not."""
        if not self.environment_spans:
            return self.response_length
        return self.response_length - self.environment_length

    @property
    def effective_response_length(self) -> int:
        """Number of response tokens that are trained on."""
        if self.remove_sample:
            return 0
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def reward_value(self, reward_key: str | None = None) -> float:
        """Return the score as a float: of a dict, its entry `reward_key`, or `score` when that is None.

        Raises:
            SampleError: there is no reward, or `reward_key` and the reward's form do not agree.
        """
        reward = self.reward
        if isinstance(reward, dict):
            key = "score" if reward_key is None else reward_key
            if not isinstance(reward.get(key), int | float):
                raise SampleError(
                    f"{self.name}: reward is a dict with keys {sorted(reward)}, reward_key is {reward_key!r}; "
                    "set --reward-key to one whose value is a number"
                )
            reward = reward[key]
        elif reward_key is not None and reward is not None:
            raise SampleError(
                f"{self.name}: reward is {reward!r}, not a dict with the key {reward_key!r}; "
                "drop --reward-key or return a dict"
            )
        if reward is None:
            raise SampleError(f"{self.name}: has no reward (status {self.status})")
        return float(reward)

    def reward_part(self, name: str) -> float:
        """Return one of several numbers that the reward is made of: an entry of its dict.

        Raises:
            SampleError: the reward is not a dict, or has no finite number of that name.
        """
        reward = self.reward
        if not isinstance(reward, dict):
            raise SampleError(
                f"{self.name}: its reward is {reward!r}, without the part {name!r}; "
                "let it return a Grade with that part, or choose several rewards by --rm-weights"
            )
        value = reward.get(name)
        if not isinstance(value, int | float) or not math.isfinite(value):
            numbers = sorted(key for key, each in reward.items() if isinstance(each, int | float))
            raise SampleError(
                f"{self.name}: its reward has {value!r} for the part {name!r}, wanted a finite number; its numbers "
                f"are {', '.join(numbers) or 'none'}"
            )
        return float(value)

    def append_response(
        self,
        tokens: Sequence[int],
        *,
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        text: str = "",
        finish_reason: str | None = None,
        weight_version: str | None = None,
        routed_experts: Any = None,
        top_p_tokens: tuple[Any, Any] | None = None,
    ) -> None:
        """Append response tokens, generated by the policy (`trainable`) or put in by an environment.

        Args:
            tokens: ids to append.
            log_probs: engine log-probs, one a token. Required for trainable tokens once the response has any,
                refused for others, which get 0.0.
            trainable: whether the loss sees these tokens.
            text: decoded text of `tokens`.
            finish_reason: `stop`, `length` or `abort`; sets `status`.
            weight_version: engine weight version that generated the tokens.
            routed_experts: the engine's experts of all tokens that the sample then has, but the last; see
                `rollout_routed_experts`.
            top_p_tokens: ids and offsets [len(tokens) + 1] of `tokens` alone; see `rollout_top_p_token_ids`.

        Raises:
            SampleError: lengths do not agree; the sample is left as it was.
        """
        begin, n = self.response_length, len(tokens)
        if finish_reason is not None and finish_reason not in STATUS_OF_FINISH:
            raise SampleError(
                f"{self.name}: finish_reason {finish_reason!r} is none of {sorted(STATUS_OF_FINISH)}"
            )
        self._check_log_probs(n, log_probs, trainable=trainable)
        if routed_experts is not None and len(routed_experts) != len(self.tokens) + n - 1:
            raise SampleError(
                f"{self.name}: routed_experts has {len(routed_experts)} rows for {len(self.tokens) + n} tokens; "
                f"wanted {len(self.tokens) + n - 1}"
            )
        check_lengths(self)
        self._append_top_p(n, top_p_tokens)
        self._append_log_probs(n, log_probs, trainable=trainable)
        if self.loss_mask is not None or not trainable:
            mask = _constant(1, begin, like=tokens) if self.loss_mask is None else self.loss_mask
            self.loss_mask = joined(mask, _constant(int(trainable), n, like=tokens), MASK)
        if n:
            put_in = not trainable and routed_experts is None
            self.rollout_routed_experts = (
                _longer(self.rollout_routed_experts, n) if put_in else routed_experts
            )
        if not trainable:
            self.environment_spans = [*self.environment_spans, [begin, begin + n]]
        self.tokens = joined(self.tokens, tokens, IDS)
        self.response_length += n
        self.response += text
        if weight_version is not None and n:
            self.weight_versions.append(weight_version)
            self.weight_version_starts.append(begin)
        if finish_reason is not None:
            self.status = STATUS_OF_FINISH[finish_reason]

    @property
    def _is_generated(self) -> bool:
        """Whether the policy generated any token: zeros on an environment's tokens say nothing of what its own will have."""
        if not self.response_length:
            return False
        masked = self.loss_mask is None or any(self.loss_mask)
        return bool(masked) or any(self.rollout_log_probs or ())

    def _check_log_probs(self, n: int, given: Sequence[float] | None, *, trainable: bool) -> None:
        """Refuse log-probs that `n` more tokens cannot have, or have to have."""
        if given is not None and not trainable:
            raise SampleError(
                f"{self.name}: log_probs given for tokens that are not trainable; leave them out"
            )
        if given is not None and len(given) != n:
            raise SampleError(f"{self.name}: {len(given)} log_probs for {n} tokens")
        if not (trainable and n and self._is_generated):
            return
        have = self.rollout_log_probs is not None
        if have != (given is not None):
            raise SampleError(
                f"{self.name}: earlier response tokens {'have' if have else 'lack'} log_probs and these "
                f"{'have them' if given is not None else 'do not'}; give log_probs for all trainable tokens or none"
            )

    def _append_log_probs(self, n: int, given: Sequence[float] | None, *, trainable: bool) -> None:
        """Append log-probs of `n` tokens that are about to be appended: zeros for an environment's."""
        before, generated = self.rollout_log_probs, self._is_generated
        if given is not None or (generated and before is not None) or (not trainable and not generated):
            if before is None:
                before = _zeros(self.response_length, like=given) if self.response_length else []
            added = _zeros(n, like=before) if given is None else given
            self.rollout_log_probs = joined(before, added, FLOAT32)
        elif n:
            self.rollout_log_probs = None

    def _append_top_p(self, n: int, given: tuple[Any, Any] | None) -> None:
        """Take in the ids that `n` tokens were drawn from, before they are appended."""
        ids, offsets = self.rollout_top_p_token_ids, self.rollout_top_p_token_offsets
        if given is None and offsets is None:
            return
        if offsets is None:
            ids, offsets = [], [0] * (self.response_length + 1)
        new_ids, new_offsets = ([], [0] * (n + 1)) if given is None else given
        if len(new_offsets) != n + 1:
            raise SampleError(
                f"{self.name}: top_p_tokens has {len(new_offsets)} offsets for {n} tokens; wanted {n + 1}"
            )
        last = int(offsets[-1])
        self.rollout_top_p_token_ids = [*ids, *new_ids]
        self.rollout_top_p_token_offsets = [*offsets, *(last + int(offset) for offset in new_offsets[1:])]

    def __copy__(self) -> Sample:
        """Return a sample with the same values, as `copy.copy` does of any object, in a fifth of its time."""
        copied = object.__new__(type(self))
        copied.__dict__ = vars(self).copy()
        return copied

    def check(self, *, vocab_size: int | None = None) -> None:
        """Check every field; see `validation.check_fields`.

        Raises:
            SampleError: names the sample, the field, what was found and what was wanted.
        """
        check_fields(self, vocab_size=vocab_size)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a dict of plain values (arrays stay arrays)."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values["status"] = self.status.value
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Sample:
        """Build a sample from `to_dict`'s output.

        One that was written before samples said where the tokens of each weight version begin has the first, oldest one
        throughout.

        Raises:
            SampleError: a key is not a field of `Sample`.
        """
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise SampleError(
                f"sample {values.get('index', '?')}: unknown fields {unknown}; put them in metadata"
            )
        fields = dict(values)
        if "weight_version_starts" not in fields and fields.get("weight_versions"):
            fields |= {"weight_versions": fields["weight_versions"][:1], "weight_version_starts": [0]}
        fields["status"] = Status(fields.get("status", Status.PENDING))
        return cls(**fields)


def _longer(experts: Any, n: int) -> Any:
    """Return routes with the last row repeated `n` times: nothing that is trained on depends on them."""
    if experts is None or not len(experts):
        return None
    held = np.asarray(experts)
    return np.concatenate([held, np.repeat(held[-1:], n, axis=0)])


def _constant(value: int, n: int, *, like: object) -> Ints:
    """Return `n` times a number of a mask, compact where another column is no list."""
    return [value] * n if isinstance(like, list) else Compact(MASK, bytes([value]) * n)


def _zeros(n: int, *, like: object) -> Floats:
    return Compact(FLOAT32, bytes(4 * n)) if isinstance(like, Compact | np.ndarray) else [0.0] * n


#: The samples of one prompt.
Group = list[Sample]
