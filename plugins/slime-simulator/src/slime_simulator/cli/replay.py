"""`slime simulate --replay RUN`: the decisions of a recorded run, made again."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from slime_core.cli.arguments import wide_console
from slime_core.plugins.registry import Registry

from slime_simulator.replay.recording import read_recording
from slime_simulator.replay.replaying import Replayed, replay


def replay_command(folder: Path, *, as_json: bool) -> int:
    """Replay a run and say whether the decisions are the recorded ones; returns the exit status, 1 where one differs.

    Raises:
        ConfigError: the folder is none whose decisions can be replayed.
    """
    registry = Registry.from_environment()
    found = replay(read_recording(folder, registry), registry)
    if as_json:
        print(json.dumps(_told(found)))
    else:
        wide_console().print(_text(found), markup=False)
    return int(found.difference is not None)


def _told(found: Replayed) -> dict[str, Any]:
    difference = found.difference
    return {
        "run": str(found.recording.folder),
        "decisions": len(found.recording.decisions),
        "replayed": len(found.decisions),
        "equal": difference is None,
        "difference": None if difference is None else asdict(difference),
        "names": dict(Counter(each["name"] for each in found.recording.decisions)),
        "filtered": found.filtered,
        "unfiltered": found.unfiltered,
    }


def _text(found: Replayed) -> str:
    recording, n = found.recording, len(found.recording.decisions)
    names = Counter(each["name"] for each in recording.decisions)
    lines = [f"{recording.folder}: the loop {recording.settings.run.loop}, {names['step_filled']} steps"]
    if recording.n_processes > 1:
        lines.append(
            f"the first of {recording.n_processes} processes; what later ones restored is in no event"
        )
    if not recording.is_whole:
        lines.append("it ended before its last step, and may have decided more than it told")
    told = ", ".join(f"{name} {count}" for name, count in names.items())
    difference = found.difference
    if difference is None:
        lines.append(f"{n} decisions, all equal: {told}")
    else:
        lines.append(f"decision {difference.number} of {n} differs:")
        lines += [
            f"  {each}" for each in recording.decisions[max(0, difference.number - 2) : difference.number]
        ]
        lines.append(f"  recorded: {_shown(difference.recorded)}")
        lines.append(f"  replayed: {_shown(difference.replayed)}")
    if found.filtered or found.unfiltered:
        lines.append(
            f"the filter decided again on the recorded samples of {found.filtered} groups; of {found.unfiltered} there are no "
            "samples, and its recorded verdict was taken"
        )
    return "\n".join(lines)


def _shown(decision: Mapping[str, Any] | None) -> str:
    return "no more" if decision is None else str(dict(decision))
