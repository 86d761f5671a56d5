"""Which samples a table shows, and how."""

from __future__ import annotations

from slime_core.samples import Sample, Status
from slime_trackers.sample_table import SampleTable, as_markdown, row


def sample(group: int, index: int, reward: object = 1.0) -> Sample:
    return Sample(
        group_index=group,
        index=index,
        prompt=f"p{group}",
        response="r",
        reward=reward,
        status=Status.COMPLETED,
    )


def test_one_sample_of_each_group_comes_before_the_second_of_any():
    table = SampleTable(3, None)
    table.take(4, [[sample(0, 0), sample(0, 1)], [sample(1, 2), sample(1, 3)]])
    assert [each[:3] for each in table.give(4)] == [(4, 0, 0), (4, 1, 2), (4, 0, 1)]
    assert table.give(4) == []


def test_none_are_kept_where_none_are_wanted():
    table = SampleTable(0, None)
    table.take(1, [[sample(0, 0)]])
    assert table.give(1) == []


def test_a_rewards_part_and_messages_are_shown():
    one = sample(0, 0, {"acc": 0.5})
    one.prompt = [{"role": "user", "content": "é"}]
    assert row(1, one, "acc") == (
        *(1, 0, 0, '[{"role": "user", "content": "é"}]', "r", "", 0.5, str(Status.COMPLETED)),
    )


def test_a_cell_does_not_break_a_table_of_markdown():
    one = sample(0, 0)
    one.response = "a|b\n<c>"
    lines = as_markdown([row(1, one, None)]).splitlines()
    assert len(lines) == 3
    assert r"a\|b<br>&lt;c>" in lines[2]
    assert lines[2].count(" | ") == 7
