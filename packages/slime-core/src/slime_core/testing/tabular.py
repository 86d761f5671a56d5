"""A policy that is one table: logits of the next token given the last one, in numpy.

Engine, trainer, tokenizer, estimator and loss over the same table satisfy core's protocols and do learn, so a
loop, a rollout function, a filter or a reward can be tested whole in milliseconds:

    slime train r.toml --rollout-engine slime_core.testing.tabular:create_engine \\
        --train-backend slime_core.testing.tabular:create_trainer \\
        --tokenizer slime_core.testing.tabular:load_tokenizer \\
        --advantage-estimator slime_core.testing.tabular:credit --loss-type slime_core.testing.tabular:reinforce \\
        --loss-reducer slime_core.testing.tabular:per_token
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from slime_core.config.build import BuildContext
from slime_core.config.factories import EngineFactory, TrainerFactory
from slime_core.errors import CheckpointError, DataError, EngineError, TrainerError, WeightSyncError
from slime_core.protocols import (
    Completion,
    EngineCapabilities,
    EngineLoad,
    Fingerprint,
    Metrics,
    ReductionView,
    SamplingParams,
    TokenView,
    TrainerCapabilities,
    TransferPlan,
)
from slime_core.run.log_prob_gate import agreement
from slime_core.runtime.phase_times import Phase
from slime_core.samples import TrainBatch
from slime_core.weights.sync import MemoryChannel

#: Letters a to z, then the end-of-sequence token.
VOCAB = 27
EOS = 26
Table = NDArray[np.float64]


class LetterTokenizer:
    """One token a lower-case letter; anything else is refused."""

    eos_token_id: int | None = EOS
    vocab_size = VOCAB

    def __len__(self) -> int:
        """Return the number of ids."""
        return VOCAB

    def encode_with_images(self, text: str, images: Sequence[str]) -> list[int]:
        """Refuse."""
        raise DataError("found an image, and TabularTokenizer reads none; wanted a tokenizer that does (hf)")

    def encode(self, text: str) -> list[int]:
        """Return a token a letter."""
        return ["abcdefghijklmnopqrstuvwxyz".index(letter) for letter in text]

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return a letter a token, and nothing for the end of the sequence."""
        return "".join(chr(97 + token) for token in tokens if token != EOS)

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, Any]], *, tools: Sequence[Any] | None = None, **kwargs: Any
    ) -> str:
        """Return the contents, joined."""
        return "".join(str(message["content"]) for message in messages)


def load_tokenizer(model_path: Path) -> LetterTokenizer:
    """Return the tokenizer; the folder is not looked at."""
    return LetterTokenizer()


def log_softmax(logits: Table) -> Table:
    """Return log-probs over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


class TabularEngine:
    """Samples from the table; one event-loop turn per token, so that several requests are in flight at once."""

    capabilities = EngineCapabilities(transports=("memory",), reports_load=True)

    def __init__(self) -> None:
        self.table: Table = np.zeros((VOCAB, VOCAB))
        self.version = "none"
        self._aborts = self._in_flight = 0

    async def start(self) -> None:
        """Nothing to do."""

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        session_id: str | None = None,
        images: Sequence[str] = (),
    ) -> Completion:
        """Sample letters until the end-of-sequence token, a stop id, the limit, or an abort."""
        if not tokens or images:
            raise EngineError(f"tabular engine: found {len(tokens)} ids and {len(images)} images; wanted ids")
        self._in_flight += 1
        try:
            return await self._generate(tokens, params)
        finally:
            self._in_flight -= 1

    async def _generate(self, tokens: Sequence[int], params: SamplingParams) -> Completion:
        out: list[int] = []
        log_probs: list[float] = []
        last, aborts, reason = tokens[-1], self._aborts, "length"
        ends = {EOS, *params.stop_token_ids}
        while len(out) < params.max_new_tokens:
            await asyncio.sleep(0)
            if self._aborts != aborts:
                reason = "abort"
                break
            row = log_softmax(self.table[last] / (params.temperature or 1.0))
            draw = np.random.default_rng([params.seed or 0, len(tokens) + len(out)]).random()
            cumulative = np.cumsum(np.exp(row))
            last = (
                int(row.argmax())
                if params.temperature == 0
                else min(int((cumulative < draw).sum()), VOCAB - 1)
            )
            out.append(last)
            log_probs.append(float(row[last]))
            if last in ends and len(out) >= params.min_new_tokens:
                reason = "stop"
                break
        return Completion(tokens=out, log_probs=log_probs, finish_reason=reason, weight_version=self.version)

    async def current_load(self) -> EngineLoad:
        """Return how many requests are in flight; it has no KV cache."""
        return EngineLoad(running=self._in_flight)

    async def abort(self) -> None:
        """End every request at its next token."""
        self._aborts += 1

    async def pause(self) -> None:
        """Nothing to do: requests take no time."""

    async def resume(self) -> None:
        """Nothing to do."""

    async def offload(self) -> None:
        """Drop the table."""
        self.table = np.full((0, 0), np.nan)

    async def onload(self) -> None:
        """Allocate an empty table; the next update fills it."""
        self.table = np.full((VOCAB, VOCAB), np.nan)

    async def open_update(self, transport: str, version: str) -> TransferPlan:
        """Open a memory channel."""
        return TransferPlan(transport=transport, version=version, dtype="float64", channel=MemoryChannel())

    async def receive(self, plan: TransferPlan) -> Fingerprint:
        """Copy the table."""
        async for bucket in plan.channel.buckets():
            for name, value in bucket:
                if name != "table" or value.shape != self.table.shape:
                    raise WeightSyncError(
                        f"{name}: found shape {value.shape}; wanted table of {self.table.shape}"
                    )
                self.table = value.copy()
        self.version = plan.version
        return fingerprint(self.table)

    async def close(self) -> None:
        """Nothing to do."""


class TabularTrainer:
    """Gradient ascent on the table by REINFORCE, with the estimator and loss that were chosen.

    It begins with the table of the model's folder, if there is one.
    """

    capabilities = TrainerCapabilities(transports=("memory",), background_save=True, offloads_weights=True)

    def __init__(
        self,
        *,
        estimator: Any,
        loss: Any,
        lr: float,
        model: Path | None = None,
        needs: Collection[str] = (),
    ) -> None:
        self.table: Table = np.zeros((VOCAB, VOCAB))
        self._model = model
        self._estimator, self._loss, self._lr, self._needs = estimator, loss, lr, needs
        self._writing: asyncio.Future[None] | None = None
        self._is_away = self._weights_are_away = False

    async def start(self) -> None:
        """Read the model's table."""
        if self._model is not None and (self._model / "table.npy").exists():
            await self.load(self._model)

    async def train(self, batch: TrainBatch) -> Metrics:
        """Take the batch's optimizer steps."""
        self._check_here()
        losses: list[float] = []
        diffs: list[float] = []
        agreed: Metrics = {}
        apart = np.full(len(batch.loss_mask), np.nan)
        previous, actions, owner = _responses(batch)
        for positions in batch.optimizer_steps:
            chosen = np.isin(owner, positions)
            rows = log_softmax(self.table[previous[chosen]] / batch.temperature)
            log_probs = rows[np.arange(len(rows)), actions[chosen]]
            view = TokenView(
                offsets=batch.response_offsets,
                sample_of_token=owner[chosen],
                loss_mask=batch.loss_mask[chosen],
                weights=batch.weights[chosen],
                rewards=batch.rewards,
                old_log_probs=log_probs,
                log_probs=log_probs,
                reward_parts=batch.reward_parts,
                staleness=batch.staleness[chosen] if "staleness" in self._needs else None,
            )
            advantages, *_ = self._estimator(view)
            loss, _ = self._loss(view, advantages)
            losses.append(float(loss))
            if batch.rollout_log_probs is not None and not diffs:
                trained = chosen & (batch.loss_mask > 0)
                apart[chosen] = np.abs(log_probs - batch.rollout_log_probs[chosen])
                diffs.append(float(apart[trained].mean()) if trained.any() else 0.0)
                agreed = agreement(batch, apart, trained, by_own_weights=False)
            delta = -np.exp(rows)
            delta[np.arange(len(rows)), actions[chosen]] += 1.0
            np.add.at(self.table, previous[chosen], self._lr * (view.weights * advantages)[:, None] * delta)
        return {
            "train/loss": float(np.mean(losses)),
            "train/train_rollout_logprob_abs_diff": float(np.mean(diffs)) if diffs else 0.0,
        } | agreed

    async def phases(self) -> Sequence[Phase]:
        """Return nothing: it takes no time."""
        return ()

    async def send(self, plan: TransferPlan) -> Fingerprint:
        """Send the table in one bucket."""
        if self._weights_are_away:
            raise TrainerError("tabular trainer: weights offloaded; wanted onload_weights first")
        await plan.channel.put([("table", self.table)])
        await plan.channel.end()
        return fingerprint(self.table)

    async def save(self, path: Path, in_background: bool = False) -> None:
        """Write the table."""
        self._check_here()
        writing = asyncio.ensure_future(asyncio.to_thread(self.write, path / "table.npy", self.table.copy()))
        if in_background:
            self._writing = writing
        else:
            await writing

    async def written(self, wait: bool) -> bool:
        """Return whether the table that is saved in the background is written."""
        if self._writing is None or (not wait and not self._writing.done()):
            return self._writing is None
        writing, self._writing = self._writing, None
        await writing
        return True

    def write(self, path: Path, table: Table) -> None:
        """Write a table, on a thread of its own."""
        np.save(path, table)

    async def load(self, path: Path) -> None:
        """Read the table."""
        try:
            self.table = np.load(path / "table.npy")
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path}: found {error}; wanted table.npy") from error

    async def save_hf(self, path: Path, merged: bool = False) -> None:
        """Write the table alone."""
        if self._weights_are_away:
            raise TrainerError(
                "tabular trainer: the table is offloaded; wanted onload_weights before save_hf"
            )
        path.mkdir(parents=True, exist_ok=True)
        np.save(path / "table.npy", self.table)

    async def offload(self) -> None:
        """Offload: until `onload` the table can be sent, but neither trained nor saved."""
        self._is_away = True

    async def offload_weights(self) -> None:
        """Offload the table, too: it cannot be sent."""
        if not self._is_away:
            raise TrainerError("tabular trainer: wanted offload first")
        self._weights_are_away = True

    async def onload_weights(self) -> None:
        """Undo `offload_weights`."""
        self._weights_are_away = False

    async def onload(self) -> None:
        """Undo both."""
        self._is_away = self._weights_are_away = False

    def _check_here(self) -> None:
        if self._is_away:
            raise TrainerError("tabular trainer: offloaded; wanted onload first")

    async def close(self) -> None:
        """Nothing to do."""


def fingerprint(table: Table) -> Fingerprint:
    """Return the checksum of the table."""
    return {"table": zlib.crc32(table.tobytes())}


def _create_trainer(build: BuildContext) -> TabularTrainer:
    from slime_core.run.assemble import algorithm  # not above: a process of `next_letter` needs none of it

    chosen = algorithm(build.settings, build.registry)
    lr = build.settings.train.lr
    return TabularTrainer(
        estimator=chosen.estimator, loss=chosen.loss, lr=lr, model=build.model_path, needs=chosen.needs
    )


#: Builds a fresh engine.
create_engine = EngineFactory(lambda build: TabularEngine(), TabularEngine.capabilities)
#: Builds a fresh trainer.
create_trainer = TrainerFactory(_create_trainer, TabularTrainer.capabilities)


def credit(view: TokenView) -> tuple[Any, Any]:
    """Credit each token with its sample's reward."""
    advantages = view.rewards[view.sample_of_token]
    return advantages, advantages


credit.reward_transform = "group-norm"  # type: ignore[attr-defined]  # what estimators declare


def reinforce(view: TokenView, advantages: Any) -> tuple[Any, dict[str, Any]]:
    """Return the negative credited log-prob."""
    return -view.reduce(view.log_probs * advantages), {}


def per_token(view: ReductionView) -> NDArray[np.float64]:
    """Weigh every trained token alike."""
    return view.loss_mask / max(1.0, float(view.loss_mask.sum()))


def next_letter(sample: Any) -> float:
    """Reward 1 when the response starts with the letter after the prompt's last one."""
    return float(sample.response[:1] == chr((ord(sample.prompt[-1]) - 97 + 1) % 26 + 97))


def _responses(batch: TrainBatch) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Return for each response token the token before it, itself, and its sample."""
    ends, lengths = batch.offsets[1:], batch.response_lengths
    positions = np.concatenate([np.arange(end - n, end) for end, n in zip(ends, lengths, strict=True)])
    tokens = batch.tokens.astype(np.int64)
    return tokens[positions - 1], tokens[positions], np.repeat(np.arange(len(lengths)), lengths)
