"""What the GPU driver's own tool, `nvidia-smi`, says of this machine."""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable, Mapping
from itertools import combinations

#: Seconds that the tool gets to answer.
_TIMEOUT_S = 20
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_GPU = re.compile(r"GPU([0-9]+)")
#: How links of the kind NVLink begin in the matrix; the number of them follows.
_NVLINK = re.compile(r"NV[0-9]+")

#: A pair of GPUs, the smaller number first -> what joins them, as `NV18` or `SYS`.
Links = Mapping[tuple[int, int], str]


def nvidia_smi(*words: str) -> str:
    """Return what the tool prints when it is called with `words`; nothing where there is no such tool.

    Raises:
        OSError: it could not be called, or did not answer, or says that it failed; the message is what it said.
    """
    try:
        done = subprocess.run(
            ["nvidia-smi", *words], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except FileNotFoundError:
        return ""
    except subprocess.TimeoutExpired as error:
        raise OSError(str(error)) from error
    if done.returncode != 0:
        raise OSError((done.stdout + done.stderr).strip() or f"status {done.returncode}")
    return done.stdout


def read_links(matrix: str) -> Links:
    """Return what joins each pair of GPUs, from what `nvidia-smi topo -m` prints; text of any other kind gives nothing.

    Its first line names the columns, those of GPUs first; each other line begins with the name of its row. Network cards,
    affinities and the legend are left out.

    Source: the legend that the tool prints below the matrix: `X` itself, `NV#` as many NVLinks, else ways over PCIe.
    """
    lines = [_ESCAPES.sub("", line).split() for line in matrix.splitlines()]
    columns: list[int] = []
    links = {}
    for words in filter(None, lines):
        if not columns:
            found = [_GPU.fullmatch(word) for word in words]
            columns = [int(match[1]) for match in found if match is not None]
        elif (row := _GPU.fullmatch(words[0])) is not None and len(words) > len(columns):
            for column, kind in zip(columns, words[1:], strict=False):
                if int(row[1]) < column:
                    links[int(row[1]), column] = kind
    return links


def has_nvlink(links: Links) -> bool:
    """Return whether an NVLink joins any two of the GPUs."""
    return any(_NVLINK.fullmatch(kind) for kind in links.values())


def finds_nvlink() -> bool:
    """Return whether the tool finds an NVLink between two GPUs of this machine; not where it says nothing."""
    try:
        return has_nvlink(read_links(nvidia_smi("topo", "-m")))
    except OSError:
        return False


def describe_links(links: Links) -> str:
    """Return a sentence on what joins the GPUs: each kind with its pairs, and the most frequent one as what is left."""
    pairs = defaultdict(list)
    for pair, kind in links.items():
        pairs[kind].append(pair)
    *rare, frequent = sorted(pairs, key=lambda kind: len(pairs[kind]))
    if not rare:
        return f"{frequent} between all {len({gpu for pair in links for gpu in pair})} GPUs"
    return "; ".join([*(f"{kind} between {_shown(pairs[kind])}" for kind in rare), f"{frequent} elsewhere"])


def _shown(pairs: Iterable[tuple[int, int]]) -> str:
    """Return pairs as text, `0-1`, and GPUs of which each is joined with each as `0-1-2-3`."""
    left, shown = set(pairs), []
    while left:
        group = list(min(left))
        for gpu in sorted({gpu for pair in left for gpu in pair}):
            if gpu not in group and all((min(gpu, one), max(gpu, one)) in left for one in group):
                group.append(gpu)
        left -= set(combinations(sorted(group), 2))
        shown.append("-".join(map(str, sorted(group))))
    return " and ".join(shown)
