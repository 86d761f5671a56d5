"""Engine, trainer, tokenizer and reward that cost next to nothing, so that what is left is the controller's own work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from slime_core.config.build import BuildContext
from slime_core.config.factories import EngineFactory, TrainerFactory
from slime_core.null.engine import NoEngine
from slime_core.null.trainer import NoTrainer
from slime_core.protocols import Completion, EngineCapabilities, Metrics, SamplingParams, TrainerCapabilities
from slime_core.samples import Sample, TrainBatch
from slime_core.samples.compact import FLOAT32, IDS, Compact
from slime_core.testing.tabular import LetterTokenizer

#: Ids are below it.
VOCAB = 150_000
#: Tokens from which each response is cut.
_POOL = 1 << 20


class NullTokenizer(LetterTokenizer):
    """A prompt is one token a letter; every response has the same text, however long it is."""

    eos_token_id: int | None = 0
    vocab_size = VOCAB

    def __len__(self) -> int:
        """Return the number of ids."""
        return VOCAB

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return a short text."""
        return "The answer is 42." if len(tokens) else ""


class NullEngine(NoEngine):
    """Answers at once with `max_new_tokens` tokens and log-probs, cut from one drawn sequence at a place of the seed's."""

    capabilities = EngineCapabilities()

    def __init__(self) -> None:
        rng = np.random.default_rng(0)
        self._ids = Compact(IDS, rng.integers(0, VOCAB, _POOL, dtype=np.int32))
        self._log_probs = Compact(FLOAT32, -rng.random(_POOL, dtype=np.float32))

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        session_id: str | None = None,
        images: Sequence[str] = (),
    ) -> Completion:
        """Answer at once."""
        n = params.max_new_tokens
        start = (params.seed or 0) * 7919 % (_POOL - n)
        span = slice(start, start + n)
        return Completion(
            tokens=self._ids[span],
            log_probs=self._log_probs[span],
            finish_reason="length",
            weight_version="0",
        )


class NullTrainer(NoTrainer):
    """Takes every batch and learns nothing."""

    capabilities = TrainerCapabilities()

    async def train(self, batch: TrainBatch) -> Metrics:
        """Do nothing."""
        return {}

    async def save(self, path: Path, in_background: bool = False) -> None:
        """Do nothing."""


async def even(sample: Sample) -> float:
    """Reward a sample whose number is even: half of each group."""
    return float((sample.index or 0) % 2)


def load_tokenizer(model_path: Path) -> NullTokenizer:
    """Return the tokenizer; the folder is not looked at."""
    return NullTokenizer()


def _engine(build: BuildContext) -> Any:
    return NullEngine()


def _trainer(build: BuildContext) -> Any:
    return NullTrainer()


#: Builds the engine.
create_engine = EngineFactory(_engine, NullEngine.capabilities)
#: Builds the trainer.
create_trainer = TrainerFactory(_trainer, NullTrainer.capabilities)
