"""`slime bench kernels`: the mix by hand, and a small one of each kind through real processes."""

from __future__ import annotations

import os
import tempfile
from collections import Counter

import pytest
from slime_bench import kernel_evaluations
from slime_bench.kernel_evaluations import BAD, GOOD, kernels, kinds_of, left_behind, own_temporary_folder
from slime_core.runtime.processes.tree import descendants


def test_a_share_of_candidates_is_bad_and_all_kinds_alike():
    kinds = kinds_of(160, share=0.1, seed=3)
    assert Counter(kinds) == {GOOD: 144} | dict.fromkeys(BAD, 2)
    assert kinds == kinds_of(160, share=0.1, seed=3)
    assert kinds != kinds_of(160, share=0.1, seed=4)


def test_what_is_left_behind_is_found_and_nothing_of_others(monkeypatch):
    monkeypatch.setattr(kernel_evaluations, "_LEFT_S", 0.0)
    pid, there = os.getpid(), descendants(os.getpid())
    with tempfile.TemporaryDirectory(), own_temporary_folder() as folder:
        assert left_behind(pid, there, folder) == []
        left = tempfile.mkdtemp()
        assert left_behind(pid, there, folder) == [left]
    assert not os.path.exists(left)


@pytest.mark.slow
@pytest.mark.faults
def test_every_bad_kind_has_a_verdict_and_leaves_nothing(capsys):
    assert kernels(["--evaluations", "10", "--bad", "0.8", "--timeout-s", "5"]) == 0
    said = capsys.readouterr().out
    assert "wrong verdicts: 0; left behind: nothing" in said
    for kind in BAD:
        assert f"{kind}: " in said
    assert "hangs: timeout" in said
    assert "sleeps: timeout" in said
