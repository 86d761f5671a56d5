"""Drawing distinct problems of a task, and a held-out part that training never sees."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from slime_core.errors import DataError

from slime_gym.section import QUESTION, GymSection
from slime_gym.tasks import task

ORIGIN_KEY = "gym"
"""Key of `Sample.metadata` under which a problem's origin travels to the reward."""

MAX_DRAWS_PER_PROBLEM = 100
"""Draws for each problem wanted, after which a task counts as exhausted."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a problem comes from: enough to make it again, and plain JSON.

    A reasoning-gym entry itself may hold tuples and dates, which would come back from a saved sample as lists and text.
    """

    task: str
    task_args: dict[str, Any]
    seed: int
    size: int
    index: int

    def entry(self) -> dict[str, Any]:
        """Make the reasoning-gym entry again."""
        entry: dict[str, Any] = self._dataset()[self.index]
        return entry

    def score(self, answer: str) -> float:
        """Return the task's own score of `answer`, from 0 to 1."""
        return float(self._dataset().score_answer(answer, self.entry()))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields."""
        return asdict(self)

    def _dataset(self) -> Any:
        return task(self.task, self.task_args, seed=self.seed, size=self.size)


@dataclass(frozen=True, kw_only=True)
class GymProblem:
    """One question."""

    question: str
    """The part of the question that goes into the prompt; two problems are the same when these are."""
    answer: str | None
    """The task's answer; None where many are right."""
    origin: Origin


def held_out_problems(section: GymSection) -> list[GymProblem]:
    """Return the `eval_size` distinct held-out problems, drawn from `eval_seed`.

    Raises:
        DataError: the task does not have that many.
    """
    return _distinct(section, section.eval_size, section.eval_seed, without=(), what="eval_size")


def training_problems(section: GymSection) -> list[GymProblem]:
    """Return `size` distinct problems, drawn from `seed`, none of which is held out.

    Different seeds alone would not keep the two apart: problem i of a task with seed s is problem i − 1 of the
    same task with seed s + 1, and small tasks repeat themselves anyway.

    Raises:
        DataError: the task does not have that many.
    """
    held_out = {problem.question for problem in held_out_problems(section)}
    return _distinct(section, section.size, section.seed, without=held_out, what="size")


def _distinct(
    section: GymSection, n_wanted: int, seed: int, *, without: Collection[str], what: str
) -> list[GymProblem]:
    shown = _shown_by(section.prompt_template)
    found: dict[str, GymProblem] = {}
    n_draws = n_wanted * MAX_DRAWS_PER_PROBLEM
    for problem in islice(_draws(section, seed, chunk_size=n_wanted), n_draws):
        if problem.question not in without and not shown(problem.question):
            found.setdefault(problem.question, problem)
        if len(found) == n_wanted:
            break
    if len(found) < n_wanted:
        besides = f" besides the {len(without)} held out" if without else ""
        raise DataError(
            f"gym.{what}: {section.task} made {len(found)} distinct problems{besides} in {n_draws} draws, "
            f"wanted {n_wanted}; lower gym.{what}, or widen gym.task_args"
        )
    return list(found.values())


def _draws(section: GymSection, seed: int, *, chunk_size: int) -> Iterator[GymProblem]:
    """Yield problems without end: the task's data sets of `chunk_size`, at seed, seed + chunk_size, ..."""
    while True:
        entries = task(section.task, section.task_args, seed=seed, size=chunk_size)
        for index in range(chunk_size):
            entry = entries[index]
            yield GymProblem(
                question=_kept_part(entry["question"], section.question_regex),
                answer=entry["answer"],
                origin=Origin(
                    task=section.task, task_args=section.task_args, seed=seed, size=chunk_size, index=index
                ),
            )
        seed += chunk_size


def _kept_part(question: str, regex: str | None) -> str:
    if regex is None:
        return question
    match = re.search(regex, question, re.DOTALL)
    if match is None or match[1] is None:
        raise DataError(f"gym.question_regex: {regex!r} does not match the question {question!r}")
    return match[1]


def _shown_by(template: str) -> Callable[[str], bool]:
    """Return whether a line of the template, an example for the model, begins with the question."""
    lines = tuple(line for line in template.splitlines() if QUESTION not in line)
    return lambda question: any(line.startswith(question) for line in lines)
