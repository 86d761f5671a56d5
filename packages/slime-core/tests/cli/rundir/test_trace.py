"""`slime trace` over a run folder that is written by hand."""

from __future__ import annotations

import json

import pytest
from slime_core.cli.main import run as slime
from slime_core.testing.traces import check_trace

EVENTS = """{"name":"header","version":1,"wall_clock":5.5,"pid":3,"step":1}
{"name":"batch","lane":"loop","begin":1.0,"seconds":0.5,"step":1}
{"name":"step","lane":"loop","begin":0.25,"seconds":2.0,"step":1}
{"name":"request","lane":"engine","begin":0.5,"seconds":0.25,"sample":0}
{"name":"step","la"""


@pytest.fixture
def folder(tmp_path):
    run = tmp_path / "runs/a"
    run.mkdir(parents=True)
    (run / "events.jsonl").write_text(EVENTS)
    (run / "config.toml").write_text("")
    return run


def test_the_trace_is_beside_the_events_or_where_it_is_asked_for(folder, tmp_path, capsys):
    assert slime(["trace", str(folder)]) == 0
    assert slime(["trace", str(folder), "--out", str(tmp_path / "b.json")]) == 0
    assert "trace.json: 4 events; open it in https://ui.perfetto.dev" in capsys.readouterr().out
    assert (folder / "trace.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert check_trace(json.loads((folder / "trace.json").read_text())["traceEvents"]) == {
        ("run", "loop"): [("step", 250_000, 2_250_000), ("batch", 1_000_000, 1_500_000)],
        ("engine", "engine"): [("request", 500_000, 750_000)],
    }


def refused(capsys, *words):
    assert slime(["trace", *map(str, words)]) == 2
    return capsys.readouterr().err


def test_what_cannot_be_traced_is_named(folder, tmp_path, capsys):
    told = refused(capsys, tmp_path / "runs/b")
    assert (
        f"{tmp_path}/runs/b, which does not exist; wanted the folder of a run; runs that are there: " in told
    )
    assert str(folder) in told
    events = folder / "events.jsonl"
    events.write_text(EVENTS.replace('"seconds":0.5', '"seconds":"long"'))
    told = refused(capsys, folder)
    assert f"{events}: found in line 2 seconds: 'long'" in told
    assert not (folder / "trace.json").exists()
    events.unlink()
    assert "unless events are switched off (--no-events)" in refused(capsys, folder)
    events.mkdir()
    assert f"{events}: found Is a directory" in refused(capsys, folder)


def test_a_file_that_cannot_be_written_is_named_and_leaves_nothing(folder, tmp_path, capsys):
    missing = tmp_path / "no/such/trace.json"
    assert f"--out: found {missing} (No such file or directory)" in refused(capsys, folder, "--out", missing)
    before = set(tmp_path.rglob("*"))
    events = folder / "events.jsonl"
    told = events.read_bytes()
    for out in (folder, events, "."):
        assert f"--out: found {out}; wanted a file of its own" in refused(capsys, folder, "--out", out)
    assert events.read_bytes() == told
    assert set(tmp_path.rglob("*")) == before
