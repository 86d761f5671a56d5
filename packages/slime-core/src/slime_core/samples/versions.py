"""Weight versions of response tokens: spans in samples and batches, one number a token where something reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from slime_core.samples.sample import Sample

#: Version of tokens whose weights are not known, or are called by something that is no number.
UNKNOWN_VERSION = -1


@dataclass(frozen=True, kw_only=True)
class VersionSpans:
    """Which weights generated which response tokens: S spans, each of one sample."""

    versions: NDArray[np.int64]
    """[S] the step after which the weights of each span were sent; `UNKNOWN_VERSION` where that is not known."""
    offsets: NDArray[np.int64]
    """[S + 1] span k has the tokens offsets[k]:offsets[k + 1]; together they cover all, in order."""

    def by_token(self) -> NDArray[np.int64]:
        """Return the version of each token [T]."""
        return np.repeat(self.versions, np.diff(self.offsets))


def version_spans(samples: Sequence[Sample]) -> VersionSpans:
    """Return the spans of some samples, whose response tokens follow one another.

    Tokens that an environment put in count for the turn of the policy before them, the first ones for the first turn.
    """
    versions: list[int] = []
    starts: list[int] = []
    begin = 0
    for sample in samples:
        starts.append(begin)
        if len(sample.weight_versions) == 1:
            versions.append(version_number(sample.weight_versions[0]))
        else:
            versions += map(version_number, sample.weight_versions or [""])
            starts += [begin + start for start in sample.weight_version_starts[1:]]
        begin += sample.response_length
    return VersionSpans(versions=np.array(versions, dtype=np.int64), offsets=np.array([*starts, begin]))


def version_number(version: str) -> int:
    """Return a weight version as a number, `UNKNOWN_VERSION` where it is none of at most 18 digits."""
    return int(version) if version.isdecimal() and len(version) <= 18 else UNKNOWN_VERSION
