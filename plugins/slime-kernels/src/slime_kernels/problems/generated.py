"""Generated problems: families of operations, of sizes that are drawn from a seed."""

from __future__ import annotations

import difflib
import random
from collections.abc import Iterator, Sequence

from slime_core.errors import DataError

from slime_kernels.problems.problem import KernelProblem
from slime_kernels.problems.templates import FAMILIES, family_of

#: Draws for each problem wanted, after which the families count as exhausted.
_DRAWS_PER_PROBLEM = 100


def generated_problems(
    n_problems: int, *, families: Sequence[str] = (), seed: int = 0, held_out: int = 0
) -> tuple[list[KernelProblem], list[KernelProblem]]:
    """Return distinct problems (to train on, held out); the same for the same arguments.

    Args:
        n_problems: to train on.
        families: to draw from; all when empty.
        seed: of the draws.
        held_out: drawn first; no source of theirs is among the others.

    Raises:
        DataError: a family is not known, or they do not have that many problems.
    """
    chosen = list(families) or list(FAMILIES)
    for family in chosen:
        if family not in FAMILIES:
            near = difflib.get_close_matches(family, FAMILIES, n=1)
            hint = f"did you mean {near[0]!r}? " if near else ""
            raise DataError(f"kernels.families: found {family!r}; {hint}wanted some of {', '.join(FAMILIES)}")
    wanted, found = held_out + n_problems, dict[str, KernelProblem]()
    for problem in _draws(chosen, seed, wanted * _DRAWS_PER_PROBLEM):
        drawn_once = family_of(problem)[0].each_once
        found.setdefault(problem.name if drawn_once else problem.code, problem)
        if len(found) == wanted:
            break
    if len(found) < wanted:
        raise DataError(
            f"kernels.size: {', '.join(chosen)} gave {len(found)} distinct problems, wanted {wanted} with those held out"
        )
    drawn = list(found.values())
    return drawn[held_out:], drawn[:held_out]


def _draws(families: Sequence[str], seed: int, most: int) -> Iterator[KernelProblem]:
    draw = random.Random(seed)
    for number in range(most):
        name = families[number % len(families)]
        family = FAMILIES[name]
        variant = draw.choice(list(family.variants))
        sizes = {size: draw.randrange(family.least, family.most + 1) for size in family.sizes}
        yield KernelProblem(
            level=family.level,
            problem_id=number,
            name=f"{name}_{variant}",
            code=family.source(variant, sizes),
            shapes=family.small,
        )
