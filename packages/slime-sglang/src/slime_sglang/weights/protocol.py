"""What a run and the weight loaders inside its servers agree on: their names, requests, results and versions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from slime_core.errors import EngineError

#: SGLang's custom weight loaders (`--custom-weight-loader`) by dotted path: the one that checks a staged update, the one that
#: loads it, and the one that receives an update and loads it as it comes.
LOADERS = CHECK, LOAD, RECEIVE = (
    "slime_sglang.inside.loader.check",
    "slime_sglang.inside.loader.load",
    "slime_sglang.inside.receiving_loader.receive",
)
#: Version of weights that SGLang reports while it has those that it started with; and what we call it before the first
#: update.
UNSENT, NONE_SENT = "default", "initial"


@dataclass(frozen=True, kw_only=True)
class LoaderRequest:
    """What the run tells a loader: JSON in the name of an empty tensor, which is all that SGLang passes on."""

    folder: str
    """Folder of the staged update, or with the description of one that ranks receive themselves."""
    answer: str
    """File that the loader writes its result to; it does not exist yet."""
    rank: int = 0
    """Which of the tensor-parallel ranks of its pipeline stage this is."""
    n_ranks: int = 1
    """How many a stage has."""
    stage: int = 0
    """Which of the server's pipeline stages it is of."""
    n_stages: int = 1
    """How many the server has."""
    attention_ranks: int | None = None
    """How many of them, in a row, share attention; all when None."""
    keeps: bool = False
    """Whether the server keeps memory that an update is read from mapped for the next one; for a server that ends with the run."""
    group_rank: int | None = None
    """Which rank of the update's group this one is; None of an update that is staged."""

    def text(self) -> str:
        """Return it as JSON."""
        return json.dumps(asdict(self))

    def at_stage(self, stage: int) -> LoaderRequest:
        """Return what a rank of another pipeline stage makes of it: SGLang gives those of all stages the same, by their `rank`."""
        own = replace(self, stage=stage)
        if stage:
            own = replace(own, answer=f"{self.answer}-stage-{stage}")
        if self.group_rank is not None:
            own = replace(own, group_rank=self.group_rank + (stage - self.stage) * self.n_ranks)
        return own


@dataclass(frozen=True, kw_only=True)
class LoaderResult:
    """What a loader found on one rank of the server."""

    error: str | None = None
    """Why it was refused, before anything was written; None when it was not."""
    is_broken: bool = False
    """Whether the error is that the sender or another rank left or hung, so that the rest did not come."""
    is_written: bool = False
    """Whether a weight had been written when the error was found."""
    sent: Mapping[str, int] | None = None
    """Fingerprints that the sender announced, of an update that the rank received itself."""
    held: Mapping[str, int] | None = None
    """Fingerprints of what the server's parameters hold after loading, by Hugging Face name; None of a check. Where a rank
    holds a part of a tensor, it is the whole tensor's fingerprint if the part is equal, and otherwise the part's."""


def read_result(path: Path) -> LoaderResult:
    """Return what a loader wrote, and remove the file.

    Raises:
        EngineError: there is no such file, or none that this host sees.
    """
    if not path.exists():
        raise EngineError(
            f"{path}: the server did not say there what became of the update; one on another host must see the run's "
            "folder under the same name"
        )
    result = LoaderResult(**json.loads(path.read_text()))
    path.unlink()
    return result
