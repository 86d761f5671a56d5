"""`slime bench graders`: our graders and those of other libraries over cases decided by hand, by class."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Console
from rich.table import Table
from slime_core.errors import ConfigError, DataError, Problem
from slime_core.plugins.registry import Registry
from slime_core.rewards.pool import RewardPool
from slime_core.rewards.results import Reward, RewardFailure
from slime_core.samples import Sample

from slime_bench.graders.peers import LIBRARIES

VERDICTS = Path("packages/slime-rm/tests/verdicts.jsonl")
"""Our cases, looked for in the working directory and above it."""
WIDTH = 160
"""Columns of the tables, at least: a narrower terminal breaks the lines, not the cells."""
ERROR = "error"
"""Verdict on bad data: the grader is to raise."""
OURS = "ours"
NOT_INSTALLED = "not installed"

Case = dict[str, Any]


@dataclass(frozen=True)
class Judged:
    """What one library makes of one case."""

    case: Case
    result: Reward | RewardFailure

    @property
    def outcome(self) -> str:
        """`right`, `accepted` (more than decided), `refused` (less), or `none`: no verdict where one was wanted.

        A number for bad data is `accepted` where it is above 0, else `refused`.
        """
        wanted = self.case["verdict"]
        score = None if isinstance(self.result, RewardFailure) else self.result.score
        if wanted == ERROR:
            return "right" if score is None else "accepted" if score > 0 else "refused"
        if score is None:
            return "none"
        return "right" if abs(score - wanted) < 1e-9 else "accepted" if score > wanted else "refused"


@dataclass(frozen=True)
class Counts:
    """How a library's verdicts compare with those decided by hand."""

    cases: int
    right: int
    accepted: int
    """Scored higher than decided, which a policy learns to exploit."""
    refused: int
    """Scored lower than decided."""
    none: int
    """Raised, hung or crashed where a score was wanted."""

    def __str__(self) -> str:
        """Return a cell of the table, such as `31 of 36, +4 -1`."""
        if not self.cases:
            return ""
        marks = (
            (f"+{self.accepted}", self.accepted),
            (f"-{self.refused}", self.refused),
            (f"?{self.none}", self.none),
        )
        wrong = " ".join(mark for mark, count in marks if count)
        return f"{self.right} of {self.cases}" + (f", {wrong}" if wrong else "")


def graders(argv: list[str]) -> int:
    """Grade every case by ours and by other libraries, and count by class who agrees with the verdict decided by hand.

    Each case is a JSON line with grader, label, response, verdict (a score, or "error" for bad data), kind, and maybe
    class, metadata and options. Other libraries are given the cases of those graders of ours that they have too.
    Exit status 1 when one of ours differs from its verdict.
    """
    arguments = _parse(argv)
    cases = _cases(_found(arguments.cases), arguments.classes)
    judged = {OURS: _judged_by_ours(cases)}
    plain = [case for case in cases if not case.get("options")]
    for name in arguments.peer or LIBRARIES:
        if LIBRARIES[name].is_installed():
            judged[name] = _judged(plain, LIBRARIES[name].graders)
    classes = list(dict.fromkeys(sorted(_class(case) for case in cases)))
    behind = _behind(judged, classes)
    missing = [name for name in arguments.peer or LIBRARIES if name not in judged]
    if arguments.json:
        print(json.dumps(_as_json(judged, classes, missing, behind), indent=2))
    else:
        _print(judged, classes, missing, behind, misses=arguments.show_misses)
    return 0 if all(each.outcome == "right" for each in judged[OURS]) else 1


def _judged_by_ours(cases: Sequence[Case]) -> list[Judged]:
    registry = Registry.from_environment()
    names = sorted({case["grader"] for case in cases})
    return _judged(cases, {name: registry.find("slime.rewards", name).value for name in names})


def _judged(cases: Sequence[Case], references: Mapping[str, str]) -> list[Judged]:
    judged: list[Judged] = []
    for name, reference in references.items():
        mine = [case for case in cases if case["grader"] == name]
        results = asyncio.run(_graded(reference, mine))
        judged += [Judged(case, result) for case, result in zip(mine, results, strict=True)]
    return judged


async def _graded(reference: str, cases: Sequence[Case]) -> list[Reward | RewardFailure]:
    """Grade cases in a pool: what hangs or crashes has no verdict. Cases with options get pools of their own."""
    results: list[Reward | RewardFailure | None] = [None] * len(cases)
    by_options: dict[str, list[int]] = {}
    for i, case in enumerate(cases):
        by_options.setdefault(json.dumps(case.get("options", {}), sort_keys=True), []).append(i)
    for options, places in by_options.items():
        async with RewardPool(reference, json.loads(options), workers=2, timeout_s=20.0) as pool:
            scored = await asyncio.gather(*(pool.score(_sample(i, cases[i])) for i in places))
        for i, result in zip(places, scored, strict=True):
            results[i] = result
    return [result for result in results if result is not None]


def _behind(judged: Mapping[str, Sequence[Judged]], classes: Sequence[str]) -> list[str]:
    """Return in which classes a library is right about more of the cases that it is given than ours."""
    ours = {id(each.case): each.outcome == "right" for each in judged[OURS]}
    behind = []
    for name in classes:
        for library, each in judged.items():
            of_class = [one for one in each if _class(one.case) == name]
            theirs = sum(one.outcome == "right" for one in of_class)
            if theirs > sum(ours[id(one.case)] for one in of_class):
                behind.append(f"{name} ({library})")
    return behind


def _counts(judged: Sequence[Judged], name: str | None = None) -> Counts:
    outcomes = [each.outcome for each in judged if name is None or _class(each.case) == name]
    return Counts(len(outcomes), *(outcomes.count(kind) for kind in ("right", "accepted", "refused", "none")))


def _milliseconds(judged: Sequence[Judged]) -> float | None:
    seconds = [each.result.seconds for each in judged if isinstance(each.result, Reward)]
    return 1000 * mean(seconds) if seconds else None


def _print(
    judged: Mapping[str, Sequence[Judged]],
    classes: Sequence[str],
    missing: Sequence[str],
    behind: Sequence[str],
    *,
    misses: int,
) -> None:
    console = Console(soft_wrap=True, highlight=False)
    console.width = max(console.width, WIDTH)
    names = [OURS, *(name for name in LIBRARIES if name in judged or name in missing)]
    total = Table(
        "",
        "version",
        "cases",
        "right",
        "false accepts",
        "false refusals",
        "no verdict",
        "ms a verdict",
        box=None,
        pad_edge=False,
        header_style="bold",
    )
    by_class = Table("class", *names, box=None, pad_edge=False, header_style="bold")
    for name in names:
        if name in missing:
            total.add_row(name, NOT_INSTALLED)
            continue
        counts, milliseconds = _counts(judged[name]), _milliseconds(judged[name])
        total.add_row(
            name,
            "" if name == OURS else LIBRARIES[name].version(),
            *map(str, (counts.cases, counts.right, counts.accepted, counts.refused, counts.none)),
            "" if milliseconds is None else f"{milliseconds:.1f}",
        )
    for name in classes:
        by_class.add_row(
            name, *(NOT_INSTALLED if each in missing else str(_counts(judged[each], name)) for each in names)
        )
    console.print(total)
    console.print(
        "\nright of the cases that it grades; + accepted wrongly, - refused wrongly, ? without a verdict\n"
    )
    console.print(by_class)
    console.print(
        f"\nours is behind in: {', '.join(behind)}" if behind else "\nours is behind in no class",
        markup=False,
    )
    if misses:
        lines = [
            _difference(name, each)
            for name in names
            if name in judged
            for each in judged[name]
            if each.outcome != "right"
        ]
        console.print(f"\nThe first {min(misses, len(lines))} of {len(lines)} differences:")
        for line in lines[:misses]:
            console.print(line, markup=False)


def _difference(name: str, judged: Judged) -> str:
    case, score = judged.case, None if isinstance(judged.result, RewardFailure) else judged.result.score
    failure = judged.result.message[-200:] if isinstance(judged.result, RewardFailure) else ""
    found = f"no verdict ({failure})" if score is None else f"{score:g}"
    return (
        f"{name} {case['grader']}: {found}, decided {case['verdict']}: label {str(case['label'])[:60]!r}, "
        f"response {case['response'][:80]!r} ({_class(case)})"
    )


def _as_json(
    judged: Mapping[str, Sequence[Judged]],
    classes: Sequence[str],
    missing: Sequence[str],
    behind: Sequence[str],
) -> dict[str, Any]:
    libraries = {
        name: {
            "version": "" if name == OURS else LIBRARIES[name].version(),
            **vars(_counts(each)),
            "ms_a_verdict": _milliseconds(each),
            "classes": {kind: vars(counts) for kind in classes if (counts := _counts(each, kind)).cases},
        }
        for name, each in judged.items()
    }
    return {"libraries": libraries | dict.fromkeys(missing, NOT_INSTALLED), "behind": list(behind)}


def _class(case: Case) -> str:
    return str(case.get("class") or case["kind"])


def _sample(index: int, case: Case) -> Sample:
    return Sample(
        index=index, response=case["response"], label=case["label"], metadata=case.get("metadata", {})
    )


def _found(path: Path | None) -> Path:
    """Return the file of cases: the one given, or ours of the repository around the working directory."""
    if path is not None:
        return path
    here = Path.cwd()
    for folder in (here, *here.parents):
        if (folder / VERDICTS).is_file():
            return folder / VERDICTS
    raise DataError(
        f"{here}: found no {VERDICTS} here or above; give the file of cases, or run in the repository"
    )


def _cases(path: Path, classes: Sequence[str] | None) -> list[Case]:
    if not path.is_file():
        raise DataError(f"{path}: found nothing; wanted cases as JSON lines")
    cases: list[Case] = []
    wanted = {"grader", "label", "response", "verdict", "kind"}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            case = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(
                f"{path}:{number}: found a line that is not JSON ({error.msg}); wanted a case"
            ) from error
        if not isinstance(case, dict) or not wanted <= set(case):
            found = f"the keys {sorted(case)}" if isinstance(case, dict) else type(case).__name__
            raise DataError(f"{path}:{number}: found {found}; wanted {sorted(wanted)}")
        cases.append(case)
    known = {_class(case) for case in cases}
    if unknown := [name for name in classes or [] if name not in known]:
        raise ConfigError(
            [Problem("--class", ", ".join(unknown), f"classes of the cases: {', '.join(sorted(known))}")]
        )
    return [case for case in cases if not classes or _class(case) in classes]


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="slime bench graders", description=graders.__doc__)
    parser.add_argument(
        "cases", type=Path, nargs="?", help=f"cases as JSON lines; {VERDICTS} of the repository"
    )
    parser.add_argument(
        "--peer", action="append", choices=list(LIBRARIES), help="libraries; all that are known"
    )
    parser.add_argument(
        "--class", dest="classes", action="append", metavar="NAME", help="cases of this class only"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--show-misses", type=int, default=0, metavar="N", help="differences to print")
    return parser.parse_args(argv)
