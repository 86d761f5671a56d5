"""What a run's folder says of its costs: metrics, lengths and times of its samples, and spans of its events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from slime_core.errors import ConfigError, Problem
from slime_core.rundir.events import HEADER, read_events
from slime_core.rundir.records import read_records
from slime_core.rundir.rundir import RunDir

from slime_simulator.costs.traces import Recorded

#: Steps at the begin that are left out where enough others are left: they compile, allocate and fill caches.
_WARM_UP = 1
_ENOUGH = 4
#: Seconds between the processes of a run, at least, on the clock of their spans.
_BETWEEN_S = 1.0


@dataclass(frozen=True)
class Span:
    """A time, in seconds on one clock of a run."""

    begin: float
    end: float

    def overlap(self, other: Span) -> float:
        """Return the seconds that it has in common with another."""
        return max(0.0, min(self.end, other.end) - max(self.begin, other.begin))


@dataclass(frozen=True, kw_only=True)
class Step:
    """What is known of a step of a run."""

    metrics: dict[str, float]
    prompts: list[int]
    """Tokens of each sample's prompt, in the order of the samples."""
    responses: list[int]
    generate_s: list[float]
    """Seconds of each sample from its submission to its answer; empty where a sample has none."""
    reward_s: list[float]
    groups: list[int] = field(default_factory=list)
    """The group of each sample; empty where each is of its own."""
    train: Span | None = None
    """Its training, where there are events."""
    generation: Span | None = None
    """From the first request of its samples to the answer of the last, where there are events."""

    @property
    def prefills(self) -> list[int]:
        """Tokens of each prompt for the first sample of a group, 0 for the others."""
        groups = self.groups or list(range(len(self.prompts)))
        firsts = [i == 0 or groups[i] != groups[i - 1] for i in range(len(groups))]
        return [n if is_first else 0 for n, is_first in zip(self.prompts, firsts, strict=True)]

    def tokens(self, *, shared: bool) -> int:
        """Return the tokens of prompts and responses; with `shared` those of a prompt count once for all its samples."""
        return sum(self.prefills if shared else self.prompts) + sum(self.responses)


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """What a run's folder says of its costs."""

    folder: Path
    config: dict[str, dict[str, Any]]
    steps: list[Step]
    lengths: dict[int, tuple[int, int]]
    """Tokens of prompt and response, by the index of the sample."""
    replicas: int = 1
    """Replicas of its engine that answered, where events say it."""
    engine_shares_prompts: bool = False
    """Whether the engine said that samples met a prompt that was prefilled before."""
    evaluations: list[float] = field(default_factory=list)
    """Seconds of each."""
    saves: list[float] = field(default_factory=list)
    """Seconds for which the loop waited for each checkpoint."""

    @property
    def loop(self) -> str:
        """The name of its loop."""
        return str(self.config.get("run", {}).get("loop", "sync")).removeprefix("slime-core/")

    @property
    def warm(self) -> list[Step]:
        """The steps after those that warm up."""
        return self.steps[_WARM_UP:] if len(self.steps) >= _ENOUGH else self.steps

    @property
    def trainer_shares_prompts(self) -> bool:
        """Whether the trainer forwarded about as many tokens as there are with each prompt once."""
        told = [
            (step.metrics["perf/forwarded_tokens"], step)
            for step in self.steps
            if "perf/forwarded_tokens" in step.metrics
        ]
        apart = sum(abs(n - step.tokens(shared=False)) for n, step in told)
        return sum(abs(n - step.tokens(shared=True)) for n, step in told) < apart

    @property
    def slots(self) -> int | None:
        """Requests that a replica of its engine decoded together at most, where its settings say so."""
        engine = str(self.config.get("rollout", {}).get("rollout_engine", "")).rpartition("/")[2]
        of_engine = self.config.get(engine, {})
        found = of_engine.get("server_args", of_engine).get("max_running_requests")
        return None if found is None else int(found)

    @property
    def trace(self) -> Recorded:
        """The lengths of the samples by index; those that it did not train on have the lengths of others."""
        known = [self.lengths[index] for index in sorted(self.lengths)]
        all_of = [self.lengths.get(i, known[i % len(known)]) for i in range(max(self.lengths) + 1)]
        prompts, responses = zip(*all_of, strict=True)
        return Recorded(prompts, responses)


def read_run(folder: Path) -> RecordedRun:
    """Read the folder of a run.

    Raises:
        ConfigError: it has no step with metrics and samples; or a file is not what a run writes.
    """
    run_dir = RunDir(folder)
    rows = {int(row["step"]): row for row in run_dir.read_metrics() if row.get("perf/step_time") is not None}
    spans = _spans(list(read_events(run_dir.events))) if run_dir.events.is_file() else []
    of_sample: dict[int, Span] = {}
    replicas = set()
    for span, event in spans:
        if event["name"] == "request" and not event.get("evaluation") and event.get("sample") is not None:
            before = of_sample.get(event["sample"], span)
            of_sample[event["sample"]] = Span(min(before.begin, span.begin), max(before.end, span.end))
            replicas.add(event["lane"])
    trained = {event.get("step"): span for span, event in spans if event["name"] == "train"}
    steps, lengths, shares = [], {}, False
    for number, row in sorted(rows.items()):
        file = run_dir.rollout_file(number)
        if not file.is_file():
            continue
        samples = sorted(read_records(file, columns=True), key=lambda sample: sample["index"] or 0)
        if any("tokens" not in sample for sample in samples):
            wanted = f"{file.with_suffix('.npz').name} beside it, whole"
            raise ConfigError([Problem("--from-run", f"{file}, whose samples are without tokens", wanted)])
        for sample in samples:
            lengths[int(sample["index"] or 0)] = _prompt(sample), int(sample["response_length"])
            shares |= bool((sample.get("prefix_cache_info") or {}).get("cached_tokens"))
        steps.append(_step(row, samples, trained.get(number), of_sample))
    if not steps:
        wanted = "the folder of a run with metrics.jsonl and rollouts/, of one step at least"
        raise ConfigError([Problem("--from-run", f"{folder}, without a step that is recorded", wanted)])
    return RecordedRun(
        folder=folder,
        config=run_dir.read_config(),
        steps=steps,
        lengths=lengths,
        replicas=max(1, len(replicas)),
        engine_shares_prompts=shares,
        evaluations=[span.end - span.begin for span, event in spans if event["name"] == "eval"],
        saves=[span.end - span.begin for span, event in spans if event["name"] == "save"],
    )


def _prompt(sample: dict[str, Any]) -> int:
    return len(sample["tokens"]) - int(sample["response_length"])


def _step(
    row: dict[str, Any], samples: Sequence[dict[str, Any]], train: Span | None, of_sample: dict[int, Span]
) -> Step:
    timings = [sample["timings"] for sample in samples]
    own = [span for sample in samples if (span := of_sample.get(sample["index"])) is not None]
    generation = None
    if len(own) == len(samples):
        generation = Span(min(span.begin for span in own), max(span.end for span in own))
    return Step(
        metrics={name: float(value) for name, value in row.items() if isinstance(value, int | float)},
        prompts=[_prompt(sample) for sample in samples],
        responses=[int(sample["response_length"]) for sample in samples],
        generate_s=[each["generate"] for each in timings if "generate" in each],
        reward_s=[each["reward"] for each in timings if "reward" in each],
        groups=[int(sample["group_index"] or 0) for sample in samples],
        train=train,
        generation=generation,
    )


def _spans(events: Iterable[dict[str, Any]]) -> list[tuple[Span, dict[str, Any]]]:
    """Return the spans of all processes on one clock, with their events."""
    found: list[tuple[Span, dict[str, Any]]] = []
    start = latest = 0.0
    for event in events:
        if event["name"] == HEADER:
            start = latest + _BETWEEN_S
        elif "begin" in event:
            begin = start + event["begin"]
            found.append((Span(begin, begin + event["seconds"]), event))
            latest = max(latest, begin + event["seconds"])
    return found


def typical(seconds: Iterable[float]) -> float:
    """Return the median; 0 where there is nothing."""
    found = list(seconds)
    return median(found) if found else 0.0
