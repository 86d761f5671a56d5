"""`slime bench trainer`: training speed, share of peak, padding and memory, ours beside transformers in one run."""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from slime_core.plugins.registry import Registry
from slime_core.run.build import resolve_model
from slime_models.hf.config import read_config

from slime_bench.memory_in_use import bytes_in_use, peak_bytes
from slime_bench.random_work import SHAPES, Lengths, random_batch, write_random_model
from slime_bench.trainer.peak import Peak, device_name, finish
from slime_bench.trainer.work import (
    Ours,
    Step,
    Transformers,
    needed_flops,
)

_GIB = 2**30
#: Name -> seconds since some moment: of time, or that the process has used of all processors.
_CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
_NOTES = """\
Both: log-probs of the responses, gradients, their norm clipped, AdamW with float32 master weights.
tokens/s: of the samples, padding not counted. spread: slowest to fastest step. of peak (MFU):
operations that the samples need, forward and twice that backward, without padding, logits of
prompts, or what is computed twice. padding: share of computed tokens, slime's in attention alone.
held: memory that a side has between steps. peak: the most in a step. alone: slime, every sample by
itself. With --clock cpu seconds are those of all threads of the process, which other work on the
machine does not add to as it does to time."""


def trainer(argv: list[str]) -> int:
    """Measure whole optimizer steps of ours: tokens a second, share of peak, padding, memory.

    Beside them those of transformers' model and torch's AdamW over the same samples; both compute in bfloat16 with float32
    master weights, and take turns in one run. transformers' micro-batches hold at most as many tokens as ours before they are
    padded to their longest sample.
    """
    options = _parse(argv)
    registry = Registry.from_environment()
    with tempfile.TemporaryDirectory(prefix="slime-bench-") as random:
        folder = Path(random) if options.shape else resolve_model(options.model, registry)
        if options.shape:
            config = SHAPES.get(options.shape) or read_config(Path(options.shape))
            registry.resolve(
                "slime.models", config.get("model_type", "")
            )  # refuses others before it takes long
            write_random_model(config, folder)
        report = _measure(options, folder, registry)
    print(_table(report))
    if options.json is not None:
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


@dataclass
class _Side:
    """One of those that take turns, over one batch."""

    name: str
    run: Step
    held: int | None
    """Bytes that it has between steps."""
    peak: int | None = None
    """The most bytes that it had in a step."""
    padding: float = 0.0
    seconds: list[float] = field(default_factory=list)
    """Of each measured step."""
    update_seconds: list[float] = field(default_factory=list)
    """Of its optimizer's part."""


def _measure(options: argparse.Namespace, folder: Path, registry: Registry) -> dict[str, Any]:
    """Return all figures, as `--json` writes them."""
    from slime_megatron import compat

    compat.install()
    import transformers.modeling_utils  # noqa: F401  # what is imported now is no side's memory
    from slime_megatron.parallel import process_groups

    device = process_groups.device()
    peak = Peak.of(device, options.peak_tflops)
    before = bytes_in_use(device)
    ours = Ours(folder, registry, max_tokens=options.max_tokens)
    batches = [random_batch(x, vocab_size=ours.architecture.vocab_size) for x in options.lengths]
    held = {ours.name: _held(ours.step(batches[0]), before, device)}
    others: list[Any] = []
    if options.peer == "transformers":
        before = bytes_in_use(device)
        others.append(Transformers(folder, device, max_tokens=options.max_tokens))
        held[others[0].name] = _held(others[0].step(batches[0]), before, device)
    work = []
    for lengths, batch in zip(options.lengths, batches, strict=True):
        sides = [_Side(side.name, side.step(batch), held[side.name]) for side in (ours, *others)]
        if lengths.common is not None:
            apart = replace(batch, group_ids=batch.sample_ids)  # samples of different groups share nothing
            sides.insert(1, _Side("alone", ours.step(apart), held[ours.name]))
        _take_turns(sides, peak, _CLOCKS[options.clock], repeats=options.repeats)
        flops = needed_flops(ours.architecture, batch)
        work.append(
            {
                "samples": lengths.name,
                "tokens": len(batch.tokens),
                "flops": flops,
                "sides": {side.name: _figures(side, len(batch.tokens), flops) for side in sides},
            }
        )
    ours.close()
    for each in work:  # the peak is known at the end
        for figures in each["sides"].values():
            figures["mfu"] = figures["flops_per_s"] / peak.flops_per_s
    return {
        "model": options.shape or options.model,
        "parameters": ours.n_parameters,
        "dtype": "bfloat16",
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "clock": options.clock,
        "versions": {name: version(name) for name in ("torch", "transformers", "megatron-core")},
        "repeats": options.repeats,
        "max_tokens": options.max_tokens,
        "peak_flops_per_s": peak.flops_per_s,
        "peak_source": peak.source,
        "work": work,
    }


def _held(step: Step, before: int | None, device: torch.device) -> int | None:
    """Return the bytes that a side has after its first step; that one also warms it up."""
    step()
    after = bytes_in_use(device)
    return None if before is None or after is None else after - before


def _take_turns(sides: list[_Side], peak: Peak, clock: Callable[[], float], *, repeats: int) -> None:
    """Time the sides in turn, so that all meet one machine; a step of each before that tells its memory."""
    for side in sides:
        before = bytes_in_use(peak.device)
        side.padding = side.run().padding
        after = peak_bytes(peak.device)
        if side.held is not None and before is not None and after is not None:
            side.peak = side.held + after - before
    for _ in range(repeats):
        peak.observe()
        for side in sides:
            finish(peak.device)
            start = clock()
            done = side.run()
            finish(peak.device)
            side.seconds.append(clock() - start)
            side.update_seconds.append(done.update_s)


def _figures(side: _Side, tokens: int, flops: int) -> dict[str, Any]:
    median = statistics.median(side.seconds)
    return {
        "seconds": side.seconds,
        "update_seconds": side.update_seconds,
        "tokens_per_s": tokens / median,
        "slowest_tokens_per_s": tokens / max(side.seconds),
        "fastest_tokens_per_s": tokens / min(side.seconds),
        "flops_per_s": flops / median,
        "padding_frac": side.padding,
        "held_bytes": side.held,
        "peak_bytes": side.peak,
    }


def _table(report: dict[str, Any]) -> str:
    """Return what is printed: lines of at most 100 columns, but for long names of a model or device."""
    threads = f", {report['threads']} threads" if report["device"] == "cpu" else ""
    lines = [
        f"{report['model']}, {report['parameters'] / 1e6:.1f} million parameters, {report['dtype']}; "
        f"{report['device']}{threads}; median of {report['repeats']} steps"
        f"{' by CPU time' if report['clock'] == 'cpu' else ''}",
        f"peak {report['peak_flops_per_s'] / 1e12:.3g} TFLOP/s: {report['peak_source']}",
        "",
    ]
    head = ("samples", "tokens", "", "tokens/s", "spread", "of peak", "padding", "GiB held", "peak")
    rows = [head, *(row for work in report["work"] for row in _rows(work))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    for row in rows:
        cells = [
            cell.ljust(width) if i in (0, 2) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    is_wall = report["clock"] == "wall"  # by which the optimizer's part is timed
    lines += [line for work in report["work"] for line in _ratio(work, is_wall=is_wall)]
    return "\n".join([*lines, "", _NOTES])


def _rows(work: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    for number, (name, side) in enumerate(work["sides"].items()):
        yield (
            "" if number else work["samples"],
            "" if number else str(work["tokens"]),
            name,
            f"{side['tokens_per_s']:.0f}",
            f"{side['slowest_tokens_per_s']:.0f}-{side['fastest_tokens_per_s']:.0f}",
            f"{side['mfu']:.1%}",
            f"{side['padding_frac']:.1%}",
            *(
                "unknown" if size is None else f"{size / _GIB:.2f}"
                for size in (side["held_bytes"], side["peak_bytes"])
            ),
        )


def _ratio(work: dict[str, Any], *, is_wall: bool) -> list[str]:
    """Return the lines that compare with each other side: of each turn, then their median."""
    (_, ours), *others = work["sides"].items()
    lines = []
    for name, side in others:
        lines.append(f"{work['samples']}: slime {_times(ours['seconds'], side['seconds'], name)}")
        if name != "alone" and is_wall:
            without = [
                [a - b for a, b in zip(each["seconds"], each["update_seconds"], strict=True)]
                for each in (ours, side)
            ]
            lines.append(f"  without the optimizer {_times(without[0], without[1], name)}")
    return lines


def _times(ours: list[float], theirs: list[float], name: str) -> str:
    """Say how many times as fast as the other side ours is."""
    ratios = [b / a for a, b in zip(ours, theirs, strict=True)]
    turns = f"turn by turn {min(ratios):.2f} to {max(ratios):.2f}"
    return f"{statistics.median(ratios):.2f} times as fast as {name} ({turns})"


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}; wanted at least 1")
    return number


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="slime bench trainer", description=trainer.__doc__, epilog=_NOTES)
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", default="smollm2-135m", help="Hugging Face folder, hub name, or short name")
    model.add_argument(
        "--shape",
        help=f"random weights in the place of a model: {', '.join(SHAPES)}, or a folder with a config.json",
    )
    parser.add_argument("--samples", type=_count, help="samples of the step (64; see --sequence)")
    parser.add_argument("--prompt", type=_count, default=50, help="tokens of each prompt")
    parser.add_argument("--response", type=_count, default=40, help="mean tokens of a response")
    parser.add_argument(
        "--sequence",
        help="full fine-tuning in the place of --prompt and --response: samples of so many tokens, and the next "
        "figures with so many, as in 4096,16384; as many samples as the longest has tokens for, if --samples is not given",
    )
    parser.add_argument(
        "--shared",
        type=float,
        help="percentage of tokens that samples have in common, from 45 to 85: conversations of eight forks, beside the same "
        "samples each by itself",
    )
    parser.add_argument(
        "--clock", choices=list(_CLOCKS), default="wall", help="time, or CPU time where the machine is busy"
    )
    parser.add_argument(
        "--max-tokens", type=_count, help="tokens of a micro-batch (4096, or the longest --sequence)"
    )
    parser.add_argument("--repeats", type=_count, default=5, help="measured steps")
    parser.add_argument(
        "--peer", choices=["transformers", "none"], default="transformers", help="beside ours"
    )
    parser.add_argument(
        "--peak-tflops",
        type=float,
        help="dense bfloat16 TFLOP/s of the device (the data sheet's of known ones; else what a large product reaches)",
    )
    parser.add_argument("--json", type=Path, help="write all figures here, too")
    options = parser.parse_args(argv)
    try:
        sequences = [_count(part) for part in options.sequence.split(",")] if options.sequence else []
    except (ValueError, argparse.ArgumentTypeError) as error:
        parser.error(f"--sequence {options.sequence}: {error}; wanted numbers of tokens as in 4096,16384")
    if min(sequences, default=2) < 2:
        parser.error(
            f"--sequence {options.sequence}: 1; wanted at least 2 tokens, of which the last is trained"
        )
    if options.peak_tflops is not None and not options.peak_tflops > 0:
        parser.error(f"--peak-tflops {options.peak_tflops}; wanted more than 0")
    if options.shape and options.shape not in SHAPES and not Path(options.shape).is_dir():
        parser.error(f"--shape {options.shape}: wanted {', '.join(SHAPES)}, or a folder with a config.json")
    n = options.samples or 64
    if options.shared is not None:
        if sequences or n % 8 or not 45 <= options.shared <= 85:
            parser.error(
                f"--shared {options.shared:g}: wanted 45 to 85, a number of --samples that eight divides (not {n}), and no "
                "--sequence"
            )
        size = {"prompt": options.prompt, "response": options.response}
        options.lengths = [Lengths.forked(n, **size, shared=options.shared / 100)]
    elif sequences:
        options.lengths = [Lengths.equal(options.samples or max(sequences) // n, n) for n in sequences]
    else:
        options.lengths = [Lengths.drawn(n, prompt=options.prompt, response=options.response)]
    options.max_tokens = options.max_tokens or max(sequences, default=4096)
    return options
