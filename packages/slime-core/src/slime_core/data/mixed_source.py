"""`MixedSource`: several data sets as one, in proportions that hold at every prompt."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

from slime_core.data.prompt_source import CHECKED, PromptSource
from slime_core.errors import CheckpointError, DataError
from slime_core.samples import Group, Sample


class MixedSource:
    """Endless prompt groups of several sources, each by its weight; satisfies `protocols.DataSource`.

    Of the first t groups, a source of share w (its weight over the sum of all) has given w t, within less than one group,
    for every t: see `next_of`. Each source counts its own epochs, and is shuffled by itself. Ids rise over all groups.

    Args:
        sources: name -> source; `metadata["source_name"]` of its samples is the name.
        weights: name -> weight, more than 0.
        n_samples_per_prompt: samples of a group.
    """

    def __init__(
        self, sources: Mapping[str, PromptSource], weights: Mapping[str, float], *, n_samples_per_prompt: int
    ) -> None:
        if not sources or sources.keys() != weights.keys() or min(weights.values()) <= 0:
            raise DataError(
                f"found the sources {list(sources)} and the weights {dict(weights)}; wanted one each"
            )
        total = sum(Fraction(weight) for weight in weights.values())
        self._sources = dict(sources)
        self._shares = {name: Fraction(weights[name]) / total for name in sources}
        self._n_samples = n_samples_per_prompt
        self._taken = dict.fromkeys(sources, 0)
        self._origins: dict[int, tuple[str, int]] = {}
        """By `group_index` of the newest groups: name of the source, and the group's index there."""

    def __len__(self) -> int:
        """Return the prompts after which the largest source, for its share, has come to its end once."""
        return max(
            -(-len(source) * share.denominator // share.numerator)
            for source, share in ((self._sources[name], share) for name, share in self._shares.items())
        )

    def prompts(self) -> Iterator[tuple[str, Sample]]:
        """Yield (place, prototype) of the prompts of each source; see `PromptSource.prompts`."""
        for source in self._sources.values():
            yield from source.prompts()

    def place_of(self, group_index: int) -> str | None:
        """Return where the prompt of a group stands; see `PromptSource.place_of`."""
        if group_index not in self._origins:
            return None
        name, its_own = self._origins[group_index]
        return self._sources[name].place_of(its_own)

    @property
    def epochs(self) -> dict[str, int]:
        """Name -> epoch of the prompt of that source that comes next, from 0."""
        return {name: source.epoch for name, source in self._sources.items()}

    def take(self, n_groups: int) -> list[Group]:
        """Return the next `n_groups` groups; never fewer. Where one cannot be built, none is taken."""
        if n_groups < 0:
            raise ValueError(f"take: n_groups is {n_groups}; wanted 0 or more")
        before = self.state()
        try:
            return [self._next_group() for _ in range(n_groups)]
        except BaseException:
            self.restore(before)
            raise

    def state(self) -> dict[str, Any]:
        """Return the position in each source, as JSON values."""
        return {
            "names": list(self._sources),
            "n_samples_per_prompt": self._n_samples,
            "taken": dict(self._taken),
            "shares": {name: str(share) for name, share in self._shares.items()},
            "sources": {name: source.state() for name, source in self._sources.items()},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a position that `state` returned.

        Raises:
            CheckpointError: the state is of other data sets, of another order of them, of other weights, or of another number
                of samples a prompt.
        """
        if "shares" not in state and (
            "length" in state or "taken" in state
        ):  # of one file, or without prompts
            raise CheckpointError(
                "source state: not taken over a mixture; resume with the prompt_data that the run began with"
            )
        shares = {name: str(share) for name, share in self._shares.items()}
        if (state["shares"], state["names"]) != (shares, list(shares)):
            raise CheckpointError(
                f"source state: taken of a mixture {state['shares']} in the order {state['names']}, this one is {shares}; "
                "resume with the names, in their order, and weights (--prompt-data, --prompt-data-weights) that the run began with"
            )
        if state["n_samples_per_prompt"] != self._n_samples:
            raise CheckpointError(
                f"source state: taken with {state['n_samples_per_prompt']} samples a prompt, found {self._n_samples}; "
                "resume with the n_samples_per_prompt that the run began with"
            )
        for name, source in self._sources.items():
            source.restore(state["sources"][name])
        self._taken = {name: int(state["taken"][name]) for name in self._sources}

    def _next_group(self) -> Group:
        number = sum(self._taken.values())
        name = next_of(self._shares, self._taken)
        (group,) = self._sources[name].take(1)
        self._taken[name] += 1
        if (its_own := group[0].group_index) is not None:
            self._origins[number] = name, its_own
        if len(self._origins) > CHECKED:
            del self._origins[next(iter(self._origins))]
        for i, sample in enumerate(group):
            sample.group_index, sample.index = number, number * self._n_samples + i
        return group


def next_of(shares: Mapping[str, Fraction], taken: Mapping[str, int]) -> str:
    """Return the name of the source that gives the next group: every count stays within less than 1 of its share, always.

    Of the sources that lag behind by at least 1 / (2n - 2) groups, n being their number, it is the one that would be first to
    lag behind by a whole one; exact, in fractions.

    Args:
        shares: name -> share; they sum up to 1.
        taken: name -> groups so far.

    Source: R. Tijdeman, The chairman assignment problem, Discrete Mathematics 32 (1980): of the first t groups
    no count is further than 1 - 1 / (2n - 2) from its share of t, the least bound that any rule can keep.
    """
    if len(shares) == 1:
        return next(iter(shares))
    slack, n_groups = Fraction(1, 2 * len(shares) - 2), sum(taken.values()) + 1
    lags = {name: share * n_groups - taken[name] for name, share in shares.items()}
    return min(
        (name for name, lag in lags.items() if lag >= slack),
        key=lambda name: (1 - slack - lags[name]) / shares[name],
    )


def named_files(words: Sequence[str]) -> dict[str, str]:
    """Return name -> file of `--prompt-data name file name file`.

    Raises:
        DataError: there is a name without a file, or a name twice.
    """
    names, files = words[::2], words[1::2]
    if len(names) != len(files) or max(Counter(names).values(), default=1) > 1:
        raise DataError(
            f"data.prompt_data: found {list(words)}; wanted one file, or names and files in turn, each name once: "
            "math math.jsonl code code.jsonl"
        )
    return dict(zip(names, files, strict=True))
