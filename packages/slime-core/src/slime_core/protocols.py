"""The seams: what an engine, a trainer, a reward, a data source and a loop look like to each other.

Core never imports torch, so tensors appear here as `Any`; each docstring gives their shapes and dtypes. Every
method that may cross a process is `async`, so that a remote handle satisfies the same protocol.
Shape letters: G samples of a group, N samples of a batch, T response tokens of a batch, flat over samples.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from slime_core.batch import TrainBatch
    from slime_core.run import Run
    from slime_core.sample import Group, Sample

Metrics = dict[str, float]


class Tokenizer(Protocol):
    """Text to ids and back. No call adds special tokens by itself."""

    eos_token_id: int | None

    def encode(self, text: str) -> list[int]:
        """Return the ids of `text`."""

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of `tokens`."""

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None, **kwargs: Any
    ) -> str:
        """Render chat messages to text that ends where the assistant is to speak.

        `kwargs` are the template's variables; `add_generation_prompt=False` ends the text with the last message.
        """


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to sample one response."""

    max_new_tokens: int
    """Most tokens to generate, at least 1."""
    min_new_tokens: int = 0
    """No stop condition applies before this many tokens."""
    temperature: float = 1.0
    """Divides the logits; 0 means greedy."""
    top_p: float = 1.0
    """Keep the smallest set of most likely tokens whose probability reaches this."""
    top_k: int = -1
    """Keep this many most likely tokens; -1 keeps all."""
    stop: tuple[str, ...] = ()
    """Strings that end the response; the tokens that spell them stay in it."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end the response, besides the tokenizer's end-of-sequence id; they stay in it."""
    seed: int | None = None
    """Same seed, prompt and weights: same response. None draws one."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the decoded text."""


#: Key of `Completion.metadata` for the ids that tokens were drawn from.
TOP_P_TOKENS = "top_p_tokens"


@dataclass(frozen=True, kw_only=True)
class Completion:
    """What an engine answers to one request."""

    tokens: list[int]
    """Generated ids, without the prompt."""
    log_probs: list[float]
    """Natural log-prob of each id under what it was sampled from: temperature, top-p and top-k applied; untempered if greedy."""
    finish_reason: str
    """`stop`, `length` or `abort` (partial output)."""
    weight_version: str
    """Version of the weights that generated it, the last of several."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Counters that the engine offers (`cached_tokens`, ...). `timings`: name -> seconds of this request, as the engine
    measures them (`e2e_latency`, `queue_time`, `first_token_latency`). `spec_info`: of an engine that speculates, the counters
    of `Sample.spec_info`. `weight_versions`: in order, `version` of the tokens
    from `start` to before `end`, where the weights may change meanwhile. `routed_experts`, where `BuildContext.engine_needs`
    has it: integers [tokens of prompt and completion but the last, num_layers, topk], the experts that each token passed.
    `top_p_tokens`, where that has it: (integers, integers [tokens + 1]), the ids that top-p and top-k left to draw each token
    from, one token's after another's, and where each token's begin; a token without could have been any."""


@dataclass(frozen=True, kw_only=True)
class TransferPlan:
    """One weight update that both sides agreed on: the engine opens it, the trainer fills it."""

    transport: str
    """Name that both sides listed in `transports`."""
    version: str
    """Version that the engine reports once the update is done."""
    dtype: str
    """Storage dtype that the engine wants, as torch spells it: `bfloat16`."""
    quantization: Mapping[str, Any] | None = None
    """`quantization_config` of the Hugging Face folder that the engine serves: which tensors it wants in few bits, with
    their scales. None: all of them in `dtype`."""
    channel: Any = None
    """Where the tensors go; its type belongs to the transport (`memory`: `weights.MemoryChannel`; others:
    `slime_models.transfer.channels`). Plans of one agreement are equal, also after crossing a process."""


#: Hugging Face tensor name -> checksum of the tensor as it is sent: in the engine's dtype, or as codes and scales.
Fingerprint = dict[str, int]


@runtime_checkable
class RolloutEngine(Protocol):
    """Generates: token ids in, token ids and log-probs out."""

    transports: tuple[str, ...]
    """Weight transports that it can receive by, best first; none if it generates nothing and takes no weights."""

    async def start(self) -> None:
        """Load the model and get ready to generate."""

    async def generate(
        self, tokens: Sequence[int], params: SamplingParams, *, session_id: str | None = None
    ) -> Completion:
        """Generate one response to the prompt ids `tokens`. Many calls may be under way at once."""

    async def abort(self) -> None:
        """End every request under way; each answers with its partial output and `abort`."""

    async def pause(self) -> None:
        """Stop generating and keep the requests under way."""

    async def resume(self) -> None:
        """Go on after `pause`."""

    async def offload(self) -> None:
        """Give up device memory; only `onload` and `close` may follow."""

    async def onload(self) -> None:
        """Take device memory back."""

    async def open_update(self, transport: str, version: str) -> TransferPlan:
        """Agree on a weight update by `transport`."""

    async def receive(self, plan: TransferPlan) -> Fingerprint:
        """Take the tensors in, in place, and return the fingerprint of the weights now held.

        Raises:
            WeightSyncError: an unknown, missing or misshapen tensor; names it. The plan's version is not current then.
        """

    async def close(self) -> None:
        """Stop, and free everything. May be called twice."""


@runtime_checkable
class Trainer(Protocol):
    """Learns from batches, and hands its weights out under their Hugging Face names."""

    transports: tuple[str, ...]
    """Weight transports that it can send by, best first; none if it has no weights."""

    async def start(self) -> None:
        """Build the model from the Hugging Face folder, and the optimizer."""

    async def train(self, batch: TrainBatch) -> Metrics:
        """Run the batch's optimizer steps; return `train/*` metrics averaged over them."""

    async def send(self, plan: TransferPlan) -> Fingerprint:
        """Put every tensor into the plan's channel, cast to its dtype or as float32 if its family says so, and quantised as
        the plan says; return the fingerprints of what was sent."""

    async def save(self, path: Path) -> None:
        """Write all state to go on from exactly (weights, optimizer, RNG, ...). See also `checkpoint.SavesInBackground`."""

    async def load(self, path: Path) -> None:
        """Restore what `save` wrote.

        Raises:
            CheckpointError: the folder is of another model, or is incomplete.
        """

    async def save_hf(self, path: Path, merged: bool = False) -> None:
        """Write a folder that other programs load: adapters, or (if `merged`, always) a whole Hugging Face folder."""

    async def offload(self) -> None:
        """Give up device memory."""

    async def onload(self) -> None:
        """Take device memory back."""

    async def close(self) -> None:
        """Free everything. May be called twice."""


class DataSource(Protocol):
    """Hands out prompt groups in a fixed order, and remembers where it is."""

    def __len__(self) -> int:
        """Return the number of prompts of an epoch; 0 when there is no end."""

    def take(self, n_groups: int) -> list[Group]:
        """Return the next `n_groups` groups, each with `n_samples_per_prompt` fresh samples."""

    def state(self) -> dict[str, Any]:
        """Return the position, as JSON values."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a position that `state` returned."""


class Buffer(Protocol):
    """Groups that were taken from the source and are still to be trained on (aborted or surplus ones)."""

    def __len__(self) -> int:
        """Return the number of groups held."""

    def put(self, groups: Sequence[Group]) -> None:
        """Add groups."""

    def take(self, n_groups: int) -> list[Group]:
        """Remove and return at most `n_groups` groups."""

    def state(self) -> dict[str, Any]:
        """Return the content, as JSON values."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go back to a content that `state` returned."""


@dataclass(frozen=True, kw_only=True)
class GenerateContext:
    """What a generator may use."""

    engine: RolloutEngine
    """Answers `abort` when the rollout has all that it needs; then the sample is to be returned as ABORTED, as far as it is."""
    tokenizer: Tokenizer
    evaluation: bool = False


class GenerateFn(Protocol):
    """Turns a pending sample into a finished one, or one execution into several samples."""

    def __call__(
        self, ctx: GenerateContext, sample: Sample, params: SamplingParams
    ) -> Awaitable[Sample | list[Sample]]:
        """Generate. `sample.tokens` holds the prompt ids, and earlier response ids when it is resumed."""


#: Scores one sample; sync or async. Keyword-only parameters are options, filled from `rm_args`. Or a class that takes the
#: options, whose objects score. Returns a number, a `rewards.results.Grade`, or a dict of JSON values.
RewardFn = Callable[..., Any]
#: Scores a whole group at once, in order; sync or async.
GroupRewardFn = Callable[..., Any]
#: (raw_rewards_N float64, group_ids_N int64, *, options) -> rewards_N float64
RewardTransform = Callable[..., "NDArray[np.float64]"]
#: (group) -> None to keep it, or the reason to drop it
GroupFilter = Callable[..., str | None]
#: Async `(run, step) -> groups`: a whole rollout.
RolloutFn = Callable[["Run", int], Awaitable["list[Group]"]]
#: Async `(run) -> None`: a whole training run.
Loop = Callable[["Run"], Awaitable[None]]


@dataclass(frozen=True, kw_only=True)
class ReductionView:
    """What a reducer sees: the masks of one optimizer step, on the host."""

    loss_mask: NDArray[np.float64]
    """[T] 1.0 where a token is trained on."""
    sample_of_token: NDArray[np.int64]
    """[T] position in the step of the sample that a token belongs to."""
    rollout_ids: NDArray[np.int64]
    """[N] execution of each sample."""


#: (view, *, options) -> weights_T float64 such that the step's loss is sum(weights_T * loss_T).
Reducer = Callable[..., "NDArray[np.float64]"]


@dataclass(frozen=True, kw_only=True)
class TokenView:
    """What an estimator or a loss sees: response tokens of some samples, flat, as torch tensors on one device.

    Log-probs are natural, float32, and taken at the rollout temperature.
    """

    offsets: Any
    """int64 [N + 1]: sample i owns the tokens offsets[i]:offsets[i + 1]."""
    sample_of_token: Any
    """int64 [T]: the sample that each token belongs to."""
    loss_mask: Any
    """float32 [T]: 1 where a token is trained on."""
    weights: Any
    """float32 [T]: share of each token in the loss of its whole optimizer step (see `Reducer`)."""
    rewards: Any
    """float32 [N]: transformed rewards."""
    old_log_probs: Any
    """float32 [T]: log-probs of the policy that the step started from, without gradient."""
    log_probs: Any = None
    """float32 [T]: log-probs under the weights being trained, with gradient. None for an estimator."""
    entropy: Any = None
    """float32 [T]: entropy (nats) of each token's distribution; only where the loss asked for it."""
    rollout_log_probs: Any = None
    """float32 [T]: the engine's log-probs."""
    ref_log_probs: Any = None
    """float32 [T]: log-probs of the reference model."""
    teacher_log_probs: Any = None
    """float32 [T]: log-probs of the teacher."""
    group_ids: Any = None
    """int64 [N]: prompt group of each sample. For estimators."""
    reward_parts: Any = None
    """Name -> float32 [N]: transformed parts of the rewards, those that the estimator names. For estimators."""
    train_metadata: Any = None
    """Sequence [N] of `Sample.train_metadata`, None where a sample has none; None where none has any."""
    sum_pi_squared: Any = None
    """float32 [T]: sum over the vocabulary of each token's squared probabilities under the old policy. For estimators."""
    values: Any = None
    """float32 [T]: the critic's values when the step began, without gradient."""
    new_values: Any = None
    """float32 [T]: the critic's values under the weights being trained, with gradient. Only for a critic's loss."""
    importance: Any = None
    """float32 [T]: what each token's policy loss is multiplied by, see `correction.Correction`; None for 1."""

    def reduce(self, values: Any) -> Any:
        """Return the scalar share of `values` [T] in the whole optimizer step: sum(weights * values).

        Shares of micro-batches and ranks add up to the step's value, however it is cut.
        """
        return (self.weights * values).sum()


#: (options) -> the optional fields of `TokenView` that must be filled under these options.
Needs = Callable[[Mapping[str, Any]], frozenset[str]]


def needs_of(function: Callable[..., Any], options: Mapping[str, Any]) -> frozenset[str]:
    """Return the optional `TokenView` fields that an estimator or a loss wants under `options`.

    Asks the function's attribute `needs` (see `Needs`); a function without one wants none. `log_probs` always
    goes to a loss and need not be named. A field that nobody wants may be left None, and its cost saved.
    """
    needs: Needs | None = getattr(function, "needs", None)
    return frozenset() if needs is None else needs(options)


class AdvantageEstimator(Protocol):
    """Credits tokens. The attribute `reward_transform` names the reward transform it wants.

    Optional attributes: `needs`, the optional fields of the view that it reads (see `needs_of`); `reward_parts`,
    (options) -> the parts of rewards that it reads; `loss`, the loss that goes with it, `policy_loss` otherwise;
    `gives_importance`, (options) -> whether its `Correction` has importance weights.
    """

    reward_transform: str

    def __call__(self, view: TokenView, **options: Any) -> tuple[Any, ...]:
        """Return (advantages [T], returns [T]), float32, without gradient; metrics, name -> scalar, may follow.

        An estimator that remembers something from batch to batch takes the keyword `state`, an empty mapping at
        first, and returns the next state, of JSON values, after the metrics. The trainer saves it with its own.
        After the state a `correction.Correction` may follow.
        """


class LossFn(Protocol):
    """The loss of some response tokens.

    An optional attribute `needs` says which optional fields of the view it reads (see `needs_of`): entropy
    only with an entropy term, reference log-probs only with a KL term. A critic's loss gets the estimator's
    returns in the place of advantages. A policy's loss that multiplies each token's loss by `view.importance`, where
    that is given, has the attribute `weighs_importance` set to True; others are refused together with importance weights.
    """

    def __call__(self, view: TokenView, advantages: Any, **options: Any) -> tuple[Any, Mapping[str, Any]]:
        """Return (scalar loss with gradient, metrics: name -> detached scalar), both reduced by `view.reduce`."""


class Tracker(Protocol):
    """Told what happens in a run; shows or stores it."""

    def run_start(self, run: Run) -> None:
        """The run is assembled and about to begin at `run.start_step`."""

    def phase(self, step: int, phase: str, done: int, total: int) -> None:
        """`done` of `total` units of a phase (`rollout`, `reward`, `train`, `sync`, `eval`, `save`) are done; before the first step it is 0."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of a step are known; step 0 is the evaluation before the first."""

    def run_end(self, summary: Mapping[str, Any]) -> None:
        """The run is over."""
