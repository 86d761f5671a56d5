"""`slime plan RECIPE --memory`: what a recipe takes of each device, by arithmetic; nothing is started, and no weights need be there.

`slime check` asks the same, and refuses what cannot fit.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from slime_core.cli.arguments import read_stages, wants_help, wide_console
from slime_core.cli.machine import device
from slime_core.config.build import MemoryQuestion
from slime_core.config.derive import is_local
from slime_core.config.memory import MemoryPrediction, predict, remedies
from slime_core.config.settings import Settings
from slime_core.errors import ConfigError, Problem
from slime_core.plugins.registry import Registry
from slime_core.protocols.memory import Device, MemoryEstimate
from slime_core.run.build import resolve_model

HELP = """usage: slime plan [RECIPE.toml ...] --memory [--flag value ...] [--device-memory-gb N] [--prompt-tokens N]

Prints what each rank of the trainer and of the engine takes at its peak, by arithmetic: nothing is started, and of the model
its config.json is enough. Where it does not fit, the cheapest changes after which it does; exit status 2 where it cannot fit
however short the samples are.

  --device-memory-gb N   memory of a GPU, GiB; when not given, that of this machine's GPUs, or on a CPU of the machine
  --prompt-tokens N      tokens of the longest prompt; rollout_max_prompt_len when not given, or 1024"""

DEVICE_MEMORY, PROMPT_TOKENS = "--device-memory-gb", "--prompt-tokens"
_GIB = 2**30
_PROMPT_TOKENS = 1024


def main(argv: list[str]) -> int:
    """Run the subcommand."""
    if wants_help(argv):
        print(HELP)
        return 0
    argv, memory_gb = taken(argv, DEVICE_MEMORY)
    argv, given = taken(argv, PROMPT_TOKENS)
    registry = Registry.from_environment()
    console, misfits = wide_console(), []
    for stage in read_stages(argv, registry):
        if stage.name:
            console.print(f"[bold]stage {stage.name}[/bold]")
        settings = stage.beforehand
        prompt = settings.data.rollout_max_prompt_len or _PROMPT_TOKENS if given is None else math.ceil(given)
        prediction = predicted(settings, registry, memory_gb=memory_gb, prompt_tokens=prompt)
        _show(console, prediction)
        misfits += said(console, prediction)
    if misfits:
        raise ConfigError(misfits)
    return 0


def taken(argv: Sequence[str], flag: str) -> tuple[list[str], float | None]:
    """Return (the words without a flag of this command and its value, the value), None where it is not given.

    Raises:
        ConfigError: it has no value, or one that is no number above 0.
    """
    rest, value = [], None
    words = iter(argv)
    for word in words:
        name, equals, text = word.partition("=")
        if name != flag:
            rest.append(word)
            continue
        text = text if equals else next(words, "")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise ConfigError([Problem(flag, text or "nothing", "a number above 0")])
    return rest, value


def device_of(settings: Settings, memory_gb: float | None) -> Device:
    """Return what a run would compute on: GPUs of so many GiB, or what this machine has.

    Other machines, those of a Ray cluster that is up, may have other memory: it is not known then. Nor is it where the settings say
    how many GPUs a machine has and this one has none: the run is not for it.
    """
    if memory_gb is not None:
        return Device(kind="cuda", memory_bytes=int(memory_gb * _GIB))
    found = device()
    if found.kind == "cpu" and settings.cluster.num_gpus_per_node is not None:
        return Device(kind="cuda", memory_bytes=None)
    joined = getattr(settings.sections.get("ray"), "address", None) or os.environ.get("RAY_ADDRESS")
    elsewhere = (joined or "local") != "local" or settings.cluster.actor_num_nodes > 1
    return replace(found, memory_bytes=None) if elsewhere and not is_local(settings.run) else found


def predicted(
    settings: Settings, registry: Registry, *, memory_gb: float | None, prompt_tokens: int
) -> MemoryPrediction:
    """Return what is predicted of a run.

    Args:
        settings: of the run.
        registry: the installed plugins.
        memory_gb: of a GPU, GiB; None for what this machine has.
        prompt_tokens: of the longest prompt.

    Raises:
        SlimeError: the model is not there, or trainer or engine do not know it.
    """
    path, device = resolve_model(settings.model.hf_checkpoint, registry), device_of(settings, memory_gb)
    return predict(
        MemoryQuestion(
            settings=settings, registry=registry, model_path=path, device=device, prompt_tokens=prompt_tokens
        )
    )


def lines(prediction: MemoryPrediction) -> list[str]:
    """Return a line for each kind of rank: its peak, and its largest parts; and which of the two predicts nothing."""
    found = [
        f"{_each(estimate)}: {_gib(estimate.total)} ({_parts(estimate)})" for estimate in _all(prediction)
    ]
    return [*found, *(f"of the {name} nothing is predicted" for name in _unknown(prediction))]


def said(console: Console, prediction: MemoryPrediction) -> list[Problem]:
    """Return that the run cannot fit; where it may, with shorter samples than the settings allow, say so instead."""
    problem = misfit(prediction)
    if problem is None or prediction.is_certain:
        return [] if problem is None else [problem]
    longest = prediction.question.longest_sample
    console.print(
        f"[yellow]may not fit[/yellow]  with samples as long as {longest} tokens, or as many: {problem}",
        soft_wrap=True,
    )
    return []


def misfit(prediction: MemoryPrediction) -> Problem | None:
    """Return what does not fit, and the cheapest changes after which it does; None where nothing says so."""
    highest, memory = prediction.highest, prediction.question.device.memory_bytes
    if prediction.fits or highest is None or memory is None:
        return None
    changes = []
    for remedy, after in remedies(prediction):
        left = after.highest.used_bytes if after.highest is not None else 0
        notes = [f"{_gib(left)}", "" if after.fits else "still too much", remedy.wants]
        notes.append(
            "" if remedy.wants or not remedy.slower else f"perhaps {100 * remedy.slower:.0f}% more time"
        )
        changes.append(f"{remedy.text} ({', '.join(filter(None, notes))})")
    return Problem(
        "memory",
        f"{_gib(highest.used_bytes)} on {highest.where}",
        f"at most {_gib(memory)}",
        "; or ".join(changes) or "take a smaller model",
    )


def _show(console: Console, prediction: MemoryPrediction) -> None:
    question = prediction.question
    estimates = _all(prediction)
    memory = "unknown" if question.device.memory_bytes is None else _gib(question.device.memory_bytes)
    what = "GPUs of" if question.device.kind == "cuda" else "a CPU, in a machine with"
    console.print(
        f"{question.settings.model.hf_checkpoint} on {what} {memory}; samples of at most {question.longest_sample} tokens, "
        f"micro-batches of {question.settings.train.max_tokens_per_gpu}",
        soft_wrap=True,
    )
    for name in _unknown(prediction):
        console.print(f"of the {name} nothing is predicted")
    if not estimates:
        return
    table = Table("GiB", *(_each(estimate) for estimate in estimates), box=None, pad_edge=False)
    for name in dict.fromkeys(name for estimate in estimates for name in estimate.parts):
        table.add_row(name, *(_cell(estimate.parts.get(name)) for estimate in estimates))
    table.add_row("[bold]on the device[/bold]", *(_cell(estimate.total) for estimate in estimates))
    for name in dict.fromkeys(name for estimate in estimates for name in estimate.host):
        table.add_row(f"host: {name}", *(_cell(estimate.host.get(name)) for estimate in estimates))
    console.print(table)
    for estimate in estimates:
        if estimate.fills is not None:
            share = f"{100 * estimate.fills:.0f}%"
            console.print(f"{estimate.who}: fills {share} of what is free when it starts", soft_wrap=True)
    for use in prediction.uses:
        console.print(f"{_gib(use.used_bytes)} on {use.where}", soft_wrap=True)


def _all(prediction: MemoryPrediction) -> list[MemoryEstimate]:
    return [*prediction.trainer, *prediction.engine]


def _unknown(prediction: MemoryPrediction) -> list[str]:
    """Return which of trainer and engine predicts nothing though there is one."""
    settings = prediction.question.settings
    chosen = {
        "trainer": (settings.train.train_backend, prediction.trainer),
        "engine": (settings.rollout.rollout_engine, prediction.engine),
    }
    return [name for name, (choice, found) in chosen.items() if choice != "none" and not found]


def _each(estimate: MemoryEstimate) -> str:
    return f"{estimate.who}, {estimate.ranks} ranks" if estimate.ranks > 1 else estimate.who


def _parts(estimate: MemoryEstimate) -> str:
    return ", ".join(
        f"{name} {size / _GIB:.2f}" for name, size in {**estimate.parts, **estimate.host}.items() if size
    )


def _cell(size: int | None) -> str:
    return "" if size is None else f"{size / _GIB:.2f}"


def _gib(size: int) -> str:
    return f"{size / _GIB:.1f} GiB"
