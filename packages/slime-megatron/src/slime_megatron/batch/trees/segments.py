"""`Segment`: a run of tokens that the same samples of a `TokenTree` share, and what follows it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from slime_megatron.batch.trees.token_tree import TokenTree


@dataclass(eq=False)
class Segment:
    """Consecutive tokens of the packed row, which see those of the segments before them."""

    rows: range
    """Their indices in the row."""
    before: int
    """Tokens of all segments before it: the position of its first token."""
    parent: Segment | None = None
    """The segment that it follows."""
    children: list[Segment] = field(default_factory=list)
    """Those that follow it."""

    @property
    def end(self) -> int:
        """The position after its last token."""
        return self.before + len(self.rows)

    def path(self) -> Iterator[Segment]:
        """Yield itself, the segment that it follows, and so on."""
        segment: Segment | None = self
        while segment is not None:
            yield segment
            segment = segment.parent

    def split(self, position: int) -> Segment:
        """Part what comes before a position into a segment that this one follows, and return it."""
        n = position - self.before
        head = Segment(self.rows[:n], self.before, self.parent, [self])
        if self.parent is not None:
            self.parent.children[self.parent.children.index(self)] = head
        self.rows, self.before, self.parent = self.rows[n:], position, head
        return head


def segments_of(
    tree: TokenTree, first_row: int = 0, *, at_ends: bool = False
) -> tuple[list[Segment], list[Segment]]:
    """Return the segments of a tree whose row begins at `first_row`, by rows, and the one that each sample ends in.

    Segments end where samples part; with `at_ends` also where a sample ends that others go on from.
    """
    ends: list[Segment] = []
    start, leaf = first_row, None
    for shared, length in tree.spans:
        parent, rows = None, range(start, start := start + length - shared)
        if shared and leaf is not None:
            parent = next(segment for segment in leaf.path() if segment.before < shared)
            if shared < parent.end and (rows or at_ends):
                parent = parent.split(shared)
        if parent is not None and not rows:
            leaf = parent
        elif parent is not None and not at_ends and not parent.children and parent.rows.stop == rows.start:
            parent.rows, leaf = range(parent.rows.start, rows.stop), parent
        else:
            leaf = Segment(rows, shared, parent)
            if parent is not None:
                parent.children.append(leaf)
        ends.append(leaf)
    found = {id(segment): segment for end in ends for segment in end.path()}
    return sorted(found.values(), key=lambda segment: segment.rows.start), ends


def row_segments(trees: Sequence[TokenTree]) -> list[Segment]:
    """Return the segments of trees that follow one another in a packed row, by rows."""
    starts = itertools.accumulate((tree.n_tokens for tree in trees), initial=0)
    return [
        segment for tree, start in zip(trees, starts, strict=False) for segment in segments_of(tree, start)[0]
    ]
