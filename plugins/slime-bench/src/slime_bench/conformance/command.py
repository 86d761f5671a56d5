"""`slime bench conformance`: one table of our numbers and the peers'."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from slime_bench.conformance import openrlhf, reference, trl, verl
from slime_bench.conformance.rows import LIMIT, Difference, Row, compare

PEERS = {"slime": reference.rows, "verl": verl.rows, "trl": trl.rows, "openrlhf": openrlhf.rows}
GOLDEN_SEED = 1


@dataclass(frozen=True)
class Result:
    """A row, worked out over all seeds."""

    row: Row
    worst: Difference
    """In float64, on the seed where the two differ most."""
    relative: float
    """Largest relative difference in float64."""
    relative_float32: float
    """Largest relative difference of ours in float32."""

    @property
    def verdict(self) -> str:
        """What the table's last column says."""
        if max(self.relative, self.relative_float32) <= LIMIT:
            return "same"
        return self.row.differs or "DIFFERS"


def conformance(argv: list[str]) -> int:
    """Compare every estimator, loss, KL, correction and reduction with verl's, TRL's and OpenRLHF's own functions.

    The reference system's conventions, which its own package would have to be built for, are written out as formulas.
    Inputs are random ragged batches; values and gradients both count. A row says `same` where the largest relative
    difference is at most 1e-6 in float64 and in float32, or names the convention that differs. The exit status is 1 where
    neither holds, or where nothing could be compared. A peer that is not installed is named, and left out.
    """
    parser = argparse.ArgumentParser(prog="slime bench conformance", description=conformance.__doc__)
    parser.add_argument("--peer", choices=list(PEERS), action="append", help="only this one; may be repeated")
    parser.add_argument("--seeds", type=_count, default=5, help="random batches")
    parser.add_argument("--write-golden", type=_new_file, help="write the peers' numbers as JSON")
    arguments = parser.parse_args(argv)
    console = Console(width=160, highlight=False)
    table = Table("peer", "quantity", "ours", "theirs", "float64", "float32", "", box=None, pad_edge=False)
    golden: dict[str, list[float]] = {}
    verdicts: Counter[str] = Counter()
    for peer in arguments.peer or PEERS:
        try:
            with _silence():
                results = list(_results(peer, arguments.seeds))
                if arguments.write_golden is not None:
                    golden |= _golden(peer)
        except ModuleNotFoundError as error:
            console.print(f"{peer}: left out, {error}; see the README of slime-bench for what to install")
            if arguments.write_golden is not None:
                console.print(
                    f"{arguments.write_golden} is not written: it must hold every peer that is asked for"
                )
                return 1
            continue
        console.print(
            "slime: formulas, written out" if peer == "slime" else f"{peer} {metadata.version(peer)}"
        )
        for result in results:
            verdicts[result.verdict if result.verdict in ("same", "DIFFERS") else "convention"] += 1
            ours, theirs = result.worst.shown
            table.add_row(
                peer,
                result.row.name,
                f"{ours:.9g}",
                f"{theirs:.9g}",
                f"{result.relative:.1e}",
                f"{result.relative_float32:.1e}",
                result.verdict,
            )
    if not verdicts:
        console.print("nothing was compared: no peer is installed")
        return 1
    console.print(table)
    console.print(
        "\nours, theirs: where they differ most, in float64. float64, float32: the largest difference, as a share of the "
        f"largest value.\n{verdicts.total()} rows: {verdicts['same']} the same within {LIMIT:g}, {verdicts['convention']} "
        f"differ by a convention that is named, {verdicts['DIFFERS']} differ otherwise."
    )
    if arguments.write_golden is not None:
        arguments.write_golden.write_text(json.dumps({"seed": GOLDEN_SEED, "rows": golden}, indent=0) + "\n")
    return 1 if verdicts["DIFFERS"] else 0


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"found {text!r}; wanted at least 1")
    return int(text)


def _new_file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"found {text!r}; wanted a file in a folder that exists")
    return path


def _results(peer: str, seeds: int) -> Iterator[Result]:
    for row in PEERS[peer]():
        doubles = [compare(row, seed, torch.float64) for seed in range(seeds)]
        singles = [compare(row, seed, torch.float32) for seed in range(seeds)]
        worst = max(doubles, key=lambda difference: difference.relative)
        yield Result(row, worst, worst.relative, max(single.relative for single in singles))


def _golden(peer: str) -> dict[str, list[float]]:
    """Return the peer's float64 numbers of the golden seed, for rows that must agree."""
    return {
        f"{peer}: {row.name}": [
            float(f"{x:.10g}") for x in compare(row, GOLDEN_SEED, torch.float64).theirs.tolist()
        ]
        for row in PEERS[peer]()
        if row.differs is None
    }


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Keep what the peers print and warn about while they are imported out of the table."""
    level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)
