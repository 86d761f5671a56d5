"""`slime bench ray-start`: seconds to the first rollout of `slime train` on a Ray cluster that is up, beside the launcher local."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.table import Table
from slime_core.errors import RunError
from slime_core.rundir.events import HEADER, read_events
from slime_core.runtime.processes.ports import ReservedPort
from slime_core.samples import Sample

#: Launchers, in the order of their turns.
WAYS = ("local", "ray")
#: What is reached, in the order of the table; the ranks' are Ray's alone.
POINTS = (
    "settings are checked", "imports begin", "rank's process", "rank has imported", "tokenizer", "run is put together",
    "trainer is started", "engine is started", "rewards are started", "weights are sent", "first rollout",
)  # fmt: skip
#: How lines on the terminal begin -> what is reached then.
_LINES = {
    "run ": "settings are checked",
    "importing ": "imports begin",
    "reading the tokenizer": "tokenizer",
    "starting the trainer": "run is put together",
    "starting the engine": "trainer is started",
}
#: Spans, by name and step -> what is reached at their end.
_ENDS = {
    ("start_engine", 0): "engine is started",
    ("start_rewards", 0): "rewards are started",
    ("update_weights", 0): "weights are sent",
}
_FIRST = POINTS[-1]
#: Seconds in which a cluster is up, or gone.
_UP_S, _GONE_S = 120.0, 30.0
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def length(sample: Sample) -> float:
    """Reward a response by its length: cheap."""
    return float(len(sample.response))


def ray_start(argv: list[str]) -> int:
    """Measure the seconds from the command to the first rollout by the launcher local, and on a Ray cluster of this machine.

    The cluster was started before (`ray start --head`), and has had a run. A small random model, the trainer megatron in one
    process, the engine torch. The launchers take turns, after a turn that is not counted. Exit status 1 when the median of
    the differences in a turn is more than `--most`.
    """
    arguments = _parse(argv)
    turns: list[dict[str, dict[str, float]]] = []
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="slime-bench-") as name, _cluster() as (address, token):
        folder = Path(name)
        flags = _flags(folder)
        ways = {"local": [], "ray": ["--launcher", "ray", "--ray-address", address, "--ray-device", "cpu"]}
        for _ in range(1 + arguments.repeats):
            turns.append({way: _timeline(folder, [*flags, *ways[way]], token) for way in WAYS})
    counted = turns[1:]
    differences = [turn["ray"][_FIRST] - turn["local"][_FIRST] for turn in counted]
    if arguments.json:
        print(json.dumps({"turns": counted, "difference_s": median(differences)}))
    else:
        _print(counted, differences, load)
    return 0 if median(differences) <= arguments.most else 1


def _print(
    turns: Sequence[Mapping[str, Mapping[str, float]]], differences: Sequence[float], load: float
) -> None:
    table = Table("seconds since the command", *WAYS, box=None, pad_edge=False, header_style="bold")
    for point in POINTS:
        table.add_row(
            point, *(_shown([turn[way][point] for turn in turns if point in turn[way]]) for way in WAYS)
        )
    console = Console(soft_wrap=True, highlight=False)
    console.print(
        f"median of {len(turns)} (lowest to highest), a process each; load at the begin {load:.1f} of {os.cpu_count()} cores"
    )
    console.print(table)
    console.print(f"Ray is later by {_shown(differences)} s")


def _shown(seconds: Sequence[float]) -> str:
    if not seconds:
        return ""
    return f"{median(seconds):.1f} ({min(seconds):.1f} to {max(seconds):.1f})"


def _timeline(folder: Path, flags: Sequence[str], token: dict[str, str]) -> dict[str, float]:
    """Run `slime train`; returns when it reached what, seconds since the command.

    Raises:
        RunError: it failed; shows the end of what it printed.
    """
    command = [sys.executable, "-m", "slime_core", "train", *flags, "--overwrite"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    begin = time.time()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment | token | {"OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    said = [(time.time(), line) for line in process.stdout]
    if process.wait():
        told = "".join(line for _, line in said)
        raise RunError(f"slime bench ray-start: slime train {' '.join(flags)} failed:\n{told[-2000:]}")
    reached = reached_by(said) | of_events(folder / "run/events.jsonl")
    log = folder / "run/ranks/rank_000.log"
    if log.exists():
        reached |= of_rank(log.read_text())
    return {point: round(reached[point] - begin, 3) for point in POINTS if point in reached}


def reached_by(said: Sequence[tuple[float, str]]) -> dict[str, float]:
    """Return what the lines on the terminal say is reached, and when the first of each kind was read."""
    reached: dict[str, float] = {}
    for at, line in said:
        words = re.sub(r"^ *\d+\.\d s  ", "", line)
        for begins, point in _LINES.items():
            if words.startswith(begins):
                reached.setdefault(point, at)
    return reached


def of_events(path: Path) -> dict[str, float]:
    """Return what a run's events say is reached, in Unix seconds."""
    reached: dict[str, float] = {}
    zero = 0.0
    for event in read_events(path):
        if event["name"] == HEADER:
            zero = event["wall_clock"]
        elif (point := _ENDS.get((event["name"], event.get("step", -1)))) is not None:
            reached[point] = zero + event["begin"] + event["seconds"]
        elif (event["name"], event.get("step")) == ("rollout", 1):
            reached[_FIRST] = zero + event["begin"]
    return reached


def of_rank(log: str) -> dict[str, float]:
    """Return when a rank's process was begun and had imported, by what its log says, in Unix seconds."""
    found = re.search(
        r"^(\S+ \S+),(\d+) .* imports took (\S+) s, and were done (\S+) s ago$", log, re.MULTILINE
    )
    if found is None:
        return {}
    at = time.mktime(time.strptime(found[1], "%Y-%m-%d %H:%M:%S")) + int(found[2]) / 1000
    imported = at - float(found[4])
    return {"rank's process": imported - float(found[3]), "rank has imported": imported}


@contextlib.contextmanager
def _cluster() -> Iterator[tuple[str, dict[str, str]]]:
    """Run a Ray cluster of this machine as `ray start --head` does; returns its address, and variables of who joins it.

    Raises:
        RunError: it is not up in time.
    """
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True))
        port, client_port = (stack.enter_context(ReservedPort()).number for _ in range(2))
        token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
        command = [
            *(str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--port", str(port)),
            *(
                "--ray-client-server-port",
                str(client_port),
                "--include-dashboard",
                "false",
                "--disable-usage-stats",
            ),
            *("--temp-dir", folder),
        ]
        output = stack.enter_context(Path(folder, "start.log").open("wb"))
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | {"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"} | token,
        )
        stack.callback(_end, process)
        deadline = time.monotonic() + _UP_S
        while "--block" not in Path(output.name).read_text():  # its last word
            if process.poll() is not None or time.monotonic() > deadline:
                told = Path(output.name).read_text()[-2000:]
                raise RunError(f"slime bench ray-start: no Ray cluster was up after {_UP_S:g} s:\n{told}")
            time.sleep(0.1)
        yield f"127.0.0.1:{port}", token


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_GONE_S)
    except subprocess.TimeoutExpired:
        process.kill()  # the kernel ends what it started
        process.wait()


def _flags(folder: Path) -> list[str]:
    """Write model and data; returns the flags of both runs."""
    from slime_bench.random_work import (
        write_random_model,
    )  # imports torch, which runs that import `length` are not to do for it

    model = folder / "model"
    model.mkdir()
    write_random_model(
        {
            "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "vocab_size": len(_LETTERS) + 1,
            "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
            "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 256, "tie_word_embeddings": False,
            "bos_token_id": None, "eos_token_id": len(_LETTERS),
        },
        model,
    )  # fmt: skip
    _write_tokenizer(model)
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"input": letter}) + "\n" for letter in _LETTERS))
    given = {
        "hf-checkpoint": model, "prompt-data": data, "output-dir": folder, "run-name": "run", "tracker": "jsonl",
        "rollout-engine": "torch", "train-backend": "megatron", "num-rollout": 1, "rollout-batch-size": 2,
        "n-samples-per-prompt": 4, "rollout-max-response-len": 8, "save-interval": "none",
        "custom-rm-path": "slime_bench.ray_start:length",
    }  # fmt: skip
    words = [word for flag, value in given.items() for word in (f"--{flag}", str(value))]
    return [*words, "--no-save-last", "--no-bf16"]


def _write_tokenizer(folder: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    ids = {letter: number for number, letter in enumerate(_LETTERS)} | {"end": len(_LETTERS)}
    words = Tokenizer(WordLevel(ids, unk_token="a"))
    tokenizer: Any = PreTrainedTokenizerFast
    tokenizer(tokenizer_object=words, eos_token="end").save_pretrained(folder)


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="slime bench ray-start", description=ray_start.__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="turns that are counted")
    parser.add_argument(
        "--most", type=float, default=10.0, help="seconds by which Ray may be later, in the median"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    return parser.parse_args(argv)
