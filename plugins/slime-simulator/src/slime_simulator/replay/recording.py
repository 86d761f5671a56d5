"""`Recording`: what a run's folder says of its decisions, and of all that they were made from."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from slime_core.config.load import load_settings
from slime_core.config.settings import Settings
from slime_core.errors import ConfigError, Problem
from slime_core.plugins.registry import Registry
from slime_core.rundir.events import DISPATCHER, HEADER, read_events
from slime_core.rundir.rundir import RunDir

Event = Mapping[str, Any]
#: What is waited for: ("finished", group, attempt), ("wanted", step, 0) or ("trained", step, 0).
Key = tuple[str, int, int]
FINISHED, WANTED, TRAINED = "finished", "wanted", "trained"
#: Seconds between instants that were recorded as one.
_APART = 1e-6
#: A moment that tells of no decision of the dispatcher's.
NO_DECISION = "concurrency_changed"
#: Of an event, what is no part of the decision that it tells. Among which step's records a group is that is dropped while the
#: event loop passes on what a step got, is a matter of its turns.
_NO_DECISION = {"group_dropped": ("lane", "at", "step")}
#: Moments between which the loop that waits for groups decided nothing.
_BETWEEN = ("groups_wanted", "groups_interrupted", "weights_arrived", "step_filled", "groups_put_back")
#: Settings with which other code than the dispatcher's decides, and the values without.
_NEEDED = {
    ("rollout", "rollout_function_path"): ("default", "slime-core/default"),
    ("data", "buffer"): ("fifo", "slime-core/fifo"),
    ("rollout", "buffer_filter_path"): (None,),
}


@dataclass(kw_only=True)
class Attempt:
    """A group in flight, from its submission to its end."""

    begin: float
    is_finished: bool = False
    """Whether it was generated and scored; others were ended, or the run was."""
    has_raised: bool = False
    has_failed_reward: bool = False
    tokens: int = 0
    """That its requests were answered."""
    version: str | None = None
    """The oldest weights of these tokens; None where there are none."""


@dataclass(kw_only=True)
class Instant:
    """What happens at once, in this order, before the dispatcher's loop looks at it."""

    at: float
    keys: list[Key]


@dataclass(kw_only=True)
class Recording:
    """One process of a run."""

    folder: Path
    settings: Settings
    num_steps: int
    is_whole: bool
    """Whether the process took the run's last step; one that was killed or interrupted may have told less than it decided."""
    n_processes: int
    """Of the run."""
    decisions: list[dict[str, Any]]
    """In their order: name, and all fields but lane and time."""
    instants: list[Instant]
    attempts: dict[int, list[Attempt]]
    """By group, in the order of their submission."""
    last_own_step: int
    """The last step whose records a later process of the run has not written anew."""
    files: dict[int, Path] = field(default_factory=dict)
    """Group -> the file that has its samples, where a step trained on it or dropped it."""
    verdicts: dict[int, str | None] = field(default_factory=dict)
    """Group -> the reason for which it was dropped as it was decided on, None where it was kept."""


def read_recording(folder: Path, registry: Registry) -> Recording:
    """Read the first process of a run.

    Raises:
        ConfigError: it has no events, was resumed in a folder without its begin, has decisions that are not the dispatcher's
            alone, or a file is not what a run writes.
    """
    run_dir = RunDir(folder)
    try:
        return _read(run_dir, registry)
    except ConfigError:
        raise
    except (KeyError, IndexError, TypeError, ValueError) as error:
        found = f"an event without what it should have ({type(error).__name__}: {error})"
        todo = "replay the file as the run wrote it"
        raise ConfigError([Problem(str(run_dir.events), found, "events of docs/events.md", todo)]) from error


def _read(run_dir: RunDir, registry: Registry) -> Recording:
    folder, events = run_dir.path, list(read_events(run_dir.events))
    headers = [number for number, event in enumerate(events) if event["name"] == HEADER]
    own = events[1 : headers[1] if len(headers) > 1 else None]
    settings = load_settings([str(run_dir.config)], [], registry=registry)
    moments = [event for event in own if event["lane"] == DISPATCHER]
    _check(folder, settings, moments, first_step=int(events[0]["step"]))
    filled = [int(event["step"]) for event in moments if event["name"] == "step_filled"]
    num_steps = settings.run.num_rollout or max(filled)
    done = {int(event["step"]) for event in own if event["name"] == "step" and event["lane"] != DISPATCHER}
    attempts = _attempts(own)
    found = Recording(
        folder=folder,
        settings=settings,
        num_steps=num_steps,
        is_whole=num_steps in done,
        n_processes=len(headers),
        decisions=decisions(own),
        instants=_instants(moments),
        attempts=attempts,
        last_own_step=int(events[headers[1]]["step"]) - 1 if len(headers) > 1 else num_steps,
    )
    _find_records(found, run_dir, moments)
    return found


def _check(folder: Path, settings: Settings, moments: Sequence[Event], *, first_step: int) -> None:
    problems = []
    for (section, key), wanted in _NEEDED.items():
        value = getattr(getattr(settings, section), key)
        if value not in wanted:
            text = f"{wanted[0] or 'none'}: the dispatcher's decisions alone are replayed"
            problems.append(Problem(f"{section}.{key} of {folder}", str(value), text))
    if first_step != 1:
        text = "a run that begins at step 1: what others restored is in no event"
        problems.append(Problem(str(folder), f"events from step {first_step}", text))
    if not any(event["name"] == "step_filled" for event in moments):
        text = "a run of one step at least, whose rollouts are the dispatcher's"
        problems.append(Problem(str(folder), "events without a step that got its groups", text))
    elif not any(event["name"] == "groups_wanted" for event in moments):
        text = "events that tell groups_wanted: record the run anew with this slime"
        problems.append(Problem(str(folder), "events of an earlier slime", text))
    if problems:
        raise ConfigError(problems)


def decisions(events: Iterable[Event]) -> list[dict[str, Any]]:
    """Return the decisions among the events of a process.

    Weights that arrive a second time, as where trainer and engine share devices, decide nothing, and are left out.
    """
    found: list[dict[str, Any]] = []
    version = None
    for event in events:
        if event.get("lane") != DISPATCHER or event["name"] == NO_DECISION:
            continue
        if event["name"] == "weights_arrived":
            if event["version"] == version:
                continue
            version = event["version"]
        hidden = _NO_DECISION.get(event["name"], ("lane", "at"))
        found.append({key: value for key, value in event.items() if key not in hidden})
    return found


def _attempts(events: Sequence[Event]) -> dict[int, list[Attempt]]:
    """Return what became of each submission of a group; a request belongs to the newest one before it."""
    found: dict[int, list[Attempt]] = defaultdict(list)
    for event in events:
        if event["name"] == "group_submitted":
            found[event["group"]].append(Attempt(begin=event["at"]))
        elif event["name"] in ("group_finished", "group_failed"):
            attempt = found[event["group"]][-1]
            attempt.is_finished, attempt.has_raised = True, event["name"] == "group_failed"
    for event in events:
        if event["name"] not in ("request", "reward") or event["evaluation"]:
            continue
        of = [attempt for attempt in found.get(event["group"], ()) if attempt.begin <= event["begin"]]
        if of and event["name"] == "reward":
            of[-1].has_failed_reward |= event["failed"]
        elif of and event["tokens"]:
            _add(of[-1], int(event["tokens"]), str(event["weight_version"]))
    return dict(found)


def _add(attempt: Attempt, tokens: int, version: str) -> None:
    attempt.tokens += tokens
    known = [each for each in (attempt.version, version) if each is not None]
    attempt.version = min(known, key=lambda each: int(each) if each.isdecimal() else -1)


def _instants(moments: Iterable[Event]) -> list[Instant]:
    """Return when what the dispatcher does not decide happened, a moment that is later than the one before."""
    found: list[Instant] = []
    tries: Counter[int] = Counter()
    begun: dict[int, int] = {}
    ending: list[_Ending] = []
    version = interrupted = None

    def add(keys: list[Key], at: float) -> None:
        found.append(Instant(at=max(at, found[-1].at + _APART if found else 0.0), keys=keys))

    for event in moments:
        name, at = event["name"], float(event["at"])
        if name == "group_submitted":
            tries[event["group"]] += 1
            begun[event["group"]] = len(ending)
        elif name in ("group_finished", "group_failed"):
            key = (FINISHED, event["group"], tries[event["group"]] - 1)
            ending.append(_Ending(key, at, begun[event["group"]]))
        elif name in _BETWEEN or (name == "group_dropped" and event["reason"] == "stale"):
            for keys, ended in _at_once(ending):
                add(keys, ended)
            ending, begun = [], dict.fromkeys(begun, 0)
        if name == "groups_wanted":
            add([(WANTED, event["step"], 0)], at)
        elif name == "groups_interrupted":
            interrupted = at
        elif name == "weights_arrived":
            if version is not None and event["version"] != version:
                add([(TRAINED, event["version"], 0)], at if interrupted is None else interrupted)
            version, interrupted = event["version"], None
    for keys, ended in _at_once(ending):
        add(keys, ended)
    return found


class _Ending(NamedTuple):
    """The end of a group in flight."""

    key: Key
    at: float
    begun: int
    """How many of the ends in a row, of which this is one, it was submitted after."""


def _at_once(ending: Sequence[_Ending]) -> Iterator[tuple[list[Key], float]]:
    """Yield which of ends in a row happen at once, and when.

    Between them the loop that waits for a step's groups decided nothing. Where it had enough of them before the last, the event
    loop took that one and those after it in one turn, and it saw them together: so do as many of the last as can, all that were
    in flight before the first of them. Before that it decides nothing whenever it looks.
    """
    latest, first = 0, len(ending)
    for i in reversed(range(len(ending))):
        latest = max(latest, ending[i].begun)
        if latest <= i:
            first = i
    for each in ending[:first]:
        yield [each.key], each.at
    if ending:
        yield [each.key for each in ending[first:]], ending[first].at


def _find_records(found: Recording, run_dir: RunDir, moments: Iterable[Event]) -> None:
    """Note where the samples of groups are, and what was decided of them first."""
    group_of: dict[int, int] = {}
    for event in moments:
        name = event["name"]
        if name == "group_submitted":
            group_of[event["number"]] = event["group"]
        elif name == "group_kept":
            found.verdicts.setdefault(event["group"], None)
        elif name == "group_dropped":
            found.verdicts.setdefault(event["group"], event["reason"])
            if event["step"] <= found.last_own_step:
                found.files[event["group"]] = run_dir.dropped_file(event["step"])
        elif name == "step_filled" and event["step"] <= found.last_own_step:
            file = run_dir.rollout_file(event["step"])
            found.files |= {group_of[number]: file for number in event["numbers"] if number in group_of}
