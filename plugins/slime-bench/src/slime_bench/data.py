"""`slime bench data`: seconds and memory until a run has its first prompts, by the number of rows of its file."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from rich.console import Console
from rich.table import Table
from slime_core.config.build import BuildContext
from slime_core.config.load import load_settings
from slime_core.data.make_source import make_source
from slime_core.data.prompt_source import PromptSource, source_of
from slime_core.data.prompts import PromptFormat, build_prompts
from slime_core.data.rows.open_rows import read_rows
from slime_core.plugins.registry import Registry
from slime_core.protocols import DataSource
from slime_core.run.build import make_build

_TABULAR = "slime_core.testing.tabular"
#: Way to have prompts -> what it is.
WAYS = {
    "index": "rows are read when they are taken (what slime does)",
    "all": "all rows are read and tokenised first",
}
#: Prompts of a step.
_TAKEN = 32
_LETTERS = "thequickbrownfoxjumpsoverthelazydog" * 3


def data(argv: list[str]) -> int:
    """Measure how long a run takes to its first 32 prompts, and with how much memory, each in a process of its own.

    JSON lines of about 130 bytes, shuffled, whose tokens are letters: a real tokenizer takes longer for each row that is read. The
    ways take turns; medians and ranges are over the repeats. Memory is the peak of the process above what it had before it
    opened the file. Linux alone.
    """
    arguments = _parse(argv)
    if arguments.measure is not None:
        print(json.dumps(_measured(arguments.measure, Path(arguments.file))))
        return 0
    table = Table(
        "rows", "way", "first prompts, s", "peak memory, MB", box=None, pad_edge=False, header_style="bold"
    )
    with tempfile.TemporaryDirectory(prefix="slime-bench-data-") as folder:
        for n_rows in arguments.rows:
            path = _written(Path(folder) / f"{n_rows}.jsonl", n_rows)
            found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
            for _ in range(arguments.repeats):
                for way, each in found.items():
                    each.append(_in_a_process(way, path))
            for way, each in found.items():
                seconds, memory = (_shown([one[key] for one in each]) for key in ("seconds", "megabytes"))
                table.add_row(f"{n_rows:,}", WAYS[way], seconds, memory)
            path.unlink()
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"median of {arguments.repeats} (lowest to highest)")
    console.print(table)
    return 0


def _measured(way: str, path: Path) -> dict[str, float]:
    """Open a file in one way and take prompts; returns seconds, and the peak of memory above what was there before."""
    (path.parent / "model").mkdir(exist_ok=True)
    flags = {
        "hf-checkpoint": str(path.parent / "model"), "tokenizer": f"{_TABULAR}:load_tokenizer", "label-key": "label",
        "rollout-engine": f"{_TABULAR}:create_engine", "train-backend": f"{_TABULAR}:create_trainer",
        "advantage-estimator": f"{_TABULAR}:credit", "loss-type": f"{_TABULAR}:reinforce",
        "loss-reducer": f"{_TABULAR}:per_token", "rm-type": f"{_TABULAR}:next_letter", "rollout-batch-size": "32",
        "rollout-max-response-len": "8", "num-rollout": "1", "lr": "1", "rollout-shuffle": "true",
        "prompt-data": str(path), "output-dir": str(path.parent / "runs"), "tracker": "jsonl",
    }  # fmt: skip
    registry = Registry()
    words = [word for key, value in flags.items() for word in (f"--{key}", value)]
    build = make_build(load_settings([], words, registry=registry), registry)
    before, begin = _memory("VmRSS"), time.perf_counter()
    source: DataSource = make_source(build) if way == "index" else _all_read(path, build)
    taken = source.take(_TAKEN)
    source.state()
    assert len(taken) == _TAKEN
    return {"seconds": time.perf_counter() - begin, "megabytes": (_memory("VmHWM") - before) / 1e6}


def _all_read(path: Path, build: BuildContext) -> PromptSource:
    """Return the source of prototypes that are all built before the first is taken."""
    records, columns = read_rows(str(path)), PromptFormat(label_key="label")
    prototypes, _ = build_prompts(records, build.tokenizer, prompt_format=columns)
    return source_of(prototypes, build)


def _in_a_process(way: str, path: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "slime_core", "bench", "data", "--measure", way, "--file", str(path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(ended.stdout.splitlines()[-1])
    return found


def _written(path: Path, n_rows: int) -> Path:
    with path.open("w", encoding="utf-8") as file:
        for number in range(n_rows):
            begin = number % len(_LETTERS)
            letters = _LETTERS[begin:] + _LETTERS[:begin]
            file.write(f'{{"input": "{letters}", "label": "{number}"}}\n')
    return path


def _memory(name: str) -> int:
    """Return a size of this process, bytes: `VmRSS` now, `VmHWM` at most (proc(5))."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (size,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    return int(size) * 1024


def _shown(values: list[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="slime bench data", description=data.__doc__)
    parser.add_argument(
        "--rows", type=int, nargs="+", default=[10_000, 100_000, 1_000_000], help="rows of the files"
    )
    parser.add_argument("--repeats", type=int, default=3, help="turns that each way has")
    parser.add_argument("--measure", choices=list(WAYS), help=argparse.SUPPRESS)
    parser.add_argument("--file", help=argparse.SUPPRESS)
    return parser.parse_args(argv)
