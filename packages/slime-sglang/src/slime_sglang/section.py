"""Settings of the engine `sglang`."""

from __future__ import annotations

import functools
import json
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt
from slime_core.config.base import SectionModel

#: Weight transports that the engine receives by, best first.
TRANSPORTS = ("memory", "distributed", "disk-delta", "disk")

#: Arguments of SGLang's that follow from slime's own settings, and where those are.
DERIVED = {
    "model_path": "model.hf_checkpoint",
    "model": "model.hf_checkpoint",
    "host": "nothing: the server listens on this host alone",
    "port": "nothing: a free one is taken",
    "custom_weight_loader": "nothing: updates are checked by slime's own",
}

Count = Annotated[int, Ge(1)]
Seconds = Annotated[float, Gt(0)]


class SglangSection(SectionModel):
    """An SGLang server (`--rollout-engine sglang`)."""

    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Storage and compute dtype of the server; `auto` is the trainer's (`bf16`, `fp16`)."""
    server_args: dict[str, Any] = {}
    """SGLang's own arguments by name, for what slime has no setting of; each can also be given as a flag,
    `--sglang-mem-fraction-static 0.8`. True stands for one without a value."""
    server_concurrency: Count = 512
    """Most requests that are under way at the server; further ones wait here."""
    start_timeout_s: Seconds = 900
    """Deadline of the server's start, seconds."""
    request_timeout_s: Seconds = 3600
    """Deadline of one generation request, seconds."""
    control_timeout_s: Seconds = 300
    """Deadline of every other call to the server, seconds; loading an update is one."""
    request_retries: Annotated[int, Ge(0)] = 3
    """How often a request is sent again that found no connection, or a server that was not ready."""
    pause_mode: Literal["retract", "abort"] = "retract"
    """What becomes of requests that are under way when weights arrive: computed anew from their tokens, or ended."""
    staging_dir: Path = Path("/dev/shm")
    """Folder in shared memory where an update lies, whole, until the server has checked and loaded it."""


@functools.cache
def known_arguments() -> frozenset[str]:
    """Return the names of all arguments of SGLang's server, of the release that this package is written for.

    They are in `sglang_flags.json`, made by `scripts/sglang_flags.py`; a test compares it with what is installed.
    """
    text = (files("slime_sglang") / "sglang_flags.json").read_text(encoding="utf-8")
    return frozenset(json.loads(text))
