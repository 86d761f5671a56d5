"""`events.jsonl` by a clock that the test turns: what is written when, and what a reader makes of damage."""

from __future__ import annotations

import json
import time

import pytest
from slime_core.errors import ConfigError
from slime_core.run.step_record import StepRecord
from slime_core.rundir.events import EventLog, read_events


class Clock:
    """Seconds that stand still until they are set."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


@pytest.fixture
def path(tmp_path):
    return tmp_path / "events.jsonl"


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def one_process(path, *, step=1):
    clock = Clock()
    log = EventLog(path, clock=clock)
    clock.now = 102.5
    log.moment("weights_arrived", lane="dispatcher", version=0)
    log.start(step)
    log.span("train", lane="loop", begin=101.25, seconds=1.0, step=step)
    log.close()


def test_times_count_from_when_the_process_put_the_run_together(path):
    one_process(path)
    header, arrived, train = lines(path)
    assert (header["name"], header["version"], header["step"]) == ("header", 1, 1)
    assert arrived == {"name": "weights_arrived", "lane": "dispatcher", "at": 2.5, "version": 0}
    assert train == {"name": "train", "lane": "loop", "begin": 1.25, "seconds": 1.0, "step": 1}


def test_nothing_is_written_before_the_start_and_nothing_without_a_file(path):
    log = EventLog(path)
    log.span("train", lane="loop", begin=0.0, seconds=1.0)
    log.close()
    assert not path.exists()
    off = EventLog()
    off.start(1)
    off.span("train", lane="loop", begin=0.0, seconds=1.0)
    off.close()
    assert not off.is_on


def test_a_block_that_raises_is_a_span(path):
    clock = Clock()
    log = EventLog(path, clock=clock)
    log.start(1)
    with pytest.raises(KeyError), log.timed("load", lane="loop", step=3):
        clock.now = 107.0
        raise KeyError
    log.close()
    assert lines(path)[1] == {"name": "load", "lane": "loop", "begin": 0.0, "seconds": 7.0, "step": 3}


def test_events_are_handed_over_once_a_second(path):
    clock = Clock()
    log = EventLog(path, clock=clock)
    log.start(1)
    for second in (0.5, 0.9, 1.5, 2.5):
        log.span("request", lane="engine", begin=100.0, seconds=second)
    log._thread.shutdown(wait=True)  # a kill: nobody hands over what is left
    assert [event["seconds"] for event in lines(path)[1:]] == [0.5, 0.9, 1.5]


def test_what_is_within_a_span_stays_so_when_it_is_rounded(path):
    """0.1 + 0.0000004 and 0.1000004 + 0.0000002 end 0.4 and 0.6 microseconds after a whole one: 0 and 1 rounded."""
    log = EventLog(path, clock=lambda: 0.0)
    log.start(1)
    log.span("outer", lane="loop", begin=0.0000006, seconds=0.1)
    log.span("inner", lane="loop", begin=0.0000014, seconds=0.0999991)
    log.close()
    _, outer, inner = lines(path)
    assert (outer["begin"], round(outer["begin"] + outer["seconds"], 9)) == (0.000001, 0.100001)
    assert (inner["begin"], round(inner["begin"] + inner["seconds"], 9)) == (0.000001, 0.1)


def test_a_line_that_a_crash_has_cut_is_left_out_and_removed_at_resume(path):
    one_process(path)
    whole = list(read_events(path))
    with path.open("ab") as file:
        file.write(b'{"name":"train","lane":"lo')
    assert list(read_events(path)) == whole
    one_process(path, step=4)
    assert [event["step"] for event in read_events(path) if event["name"] == "header"] == [1, 4]
    assert len(list(read_events(path))) == 6


def test_a_file_without_a_whole_line_begins_anew(path):
    path.write_bytes(b"\0" * 200_000)
    assert list(read_events(path)) == []
    one_process(path)
    assert len(list(read_events(path))) == 3


def test_text_that_is_no_text_does_not_stop_the_others(path):
    log = EventLog(path)
    log.start(1)
    log.moment("group_dropped", lane="dispatcher", reason="half \ud800")
    log.moment("group_kept", lane="dispatcher", value=float("nan"), reason="\ud800")
    log.close()
    _, dropped, kept = read_events(path)
    assert (dropped["reason"], kept["value"]) == ("half ?", None)


def test_where_nothing_can_be_written_a_warning_says_so_once_and_the_run_goes_on(path, caplog):
    log = EventLog(path)
    log.start(1)
    log.flush()
    path.unlink()
    path.mkdir()
    for _ in range(3):
        log.span("train", lane="loop", begin=0.0, seconds=1.0)
        log.flush()
    log.close()
    assert not log.is_on
    (told,) = caplog.messages
    assert told.startswith(f"{path}: ")
    assert told.endswith("takes down no more events")


HEADER = '{"name":"header","version":1,"wall_clock":0.0,"pid":1,"step":1}\n'


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (HEADER + '{"name":"a","lane":"b"}\n', "in line 2 begin: missing"),
        (HEADER + '{"name":"a","lane":"b","begin":-1,"seconds":1}\n', "in line 2 begin: -1"),
        (HEADER + '{"name":"a","lane":"b","begin":0,"seconds":1e300}\n', "in line 2 seconds: 1e\\+300"),
        (HEADER + '{"name":"a","begin":0,"seconds":0}\n', "in line 2 lane: missing"),
        (HEADER + "[]\n", "in line 2 a JSON list; wanted an event of docs/events.md; delete or mend"),
        (HEADER + HEADER[:20] + "\n" + HEADER, "in line 2 no JSON"),
        ('{"name":"a","lane":"b","at":0}\n', "in line 1 no header, which comes first"),
        (HEADER.replace("1", "2", 1), "in line 1 version 2; this slime reads version 1"),
    ],
)
def test_a_damaged_line_is_named(path, text, told):
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"events.jsonl: found {told}"):
        list(read_events(path))


def test_no_file_is_said_to_be_none(path):
    with pytest.raises(ConfigError, match=r"no such file; wanted the events of a run; slime train writes it"):
        list(read_events(path))


def test_what_was_told_is_in_the_file_while_the_next_phase_goes_on(path):
    """However short the time since lines were written last."""
    clock = Clock()
    log = EventLog(path, clock=clock)
    log.start(step=1)
    record = StepRecord(step=1)
    with record.timed("batch", log):
        pass
    with record.timed("train", log):
        deadline = time.monotonic() + 30
        while '"batch"' not in path.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    log.close()
    assert [line["name"] for line in lines(path)] == ["header", "batch", "train"]
