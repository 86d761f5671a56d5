"""Records: what is written is what the samples held, and nothing is lost or mixed up."""

from __future__ import annotations

import json
import zipfile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from slime_core.rundir.records import COLUMNS, RecordWriter, read_records, records_of
from slime_core.rundir.rundir import RunDir
from slime_core.samples import Sample
from slime_core.samples.compact import FLOAT32, IDS, Compact


def written(path, samples, dropped=()):
    writer = RecordWriter()
    writer.write(path, records_of(samples, dropped))
    writer.flush()
    writer.close()
    return list(read_records(path))


def columns(sample):
    return {name: getattr(sample, name) for name in COLUMNS}


ID = st.integers(0, 2**31 - 1)
LOG_PROB = st.floats(-1e3, 0.0)


@st.composite
def made(draw):
    n = draw(st.integers(0, 4))
    column = st.none() | st.lists(LOG_PROB, min_size=n, max_size=n)
    return Sample(
        index=draw(st.none() | st.integers(0, 9)),
        tokens=draw(st.lists(ID, min_size=n, max_size=n + 3)),
        response_length=n,
        loss_mask=draw(st.none() | st.lists(st.integers(0, 1), min_size=n, max_size=n)),
        rollout_log_probs=draw(column),
        teacher_log_probs=draw(column),
        response=draw(st.text()),
        metadata={"n": n},
    )


@given(samples=st.lists(made(), max_size=5))
def test_every_number_comes_back_as_it_was(samples, tmp_path_factory):
    path = tmp_path_factory.mktemp("records") / "step_000001.jsonl"
    rows = written(path, samples)
    assert [{name: row[name] for name in COLUMNS} for row in rows] == [columns(sample) for sample in samples]
    assert [Sample.from_dict(row) for row in rows] == samples


def test_the_archive_is_what_numpy_writes(tmp_path):
    sample = Sample(index=3, tokens=[1, 2], response_length=2, rollout_log_probs=[-0.5, -1.0])
    written(tmp_path / "a.jsonl", [sample])
    columns = {
        "index": np.array([3]),
        "tokens": np.array([1, 2], dtype=np.int32),
        "tokens_offsets": np.array([0, 2]),
        "rollout_log_probs": np.array([-0.5, -1.0], dtype=np.float32),
        "rollout_log_probs_offsets": np.array([0, 2]),
    }
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        found = {name: archive.read(name) for name in archive.namelist()}
    for name, column in columns.items():
        np.save(tmp_path / "column.npy", column)
        assert found.pop(f"{name}.npy") == (tmp_path / "column.npy").read_bytes()
    assert not found


def test_lines_are_readable_without_the_columns(tmp_path):
    sample = Sample(index=3, tokens=[1, 2], response="é", response_length=1, reward=0.5)
    written(tmp_path / "a.jsonl", [sample], ["too easy"])
    (line,) = (tmp_path / "a.jsonl").read_text().splitlines()
    row = json.loads(line)
    assert {
        "index": 3,
        "response": "é",
        "reward": 0.5,
        "status": "pending",
        "dropped": "too easy",
    }.items() <= row.items()
    assert row["loss_mask"] is None and "tokens" not in row
    with np.load(tmp_path / "a.npz") as archive:
        assert archive["tokens"].tolist() == [1, 2] and archive["tokens"].dtype == np.int32
        assert archive["tokens_offsets"].tolist() == [0, 2]
        assert archive["index"].tolist() == [3]


def test_log_probs_take_32_bits_where_these_hold_them(tmp_path):
    for values, dtype in (([-0.5], np.float32), ([-0.1], np.float64), (Compact(FLOAT32, [-0.1]), np.float32)):
        sample = Sample(tokens=[1, 2], response_length=1, rollout_log_probs=values)
        assert written(tmp_path / "a.jsonl", [sample])[0]["rollout_log_probs"] == list(values)
        assert np.load(tmp_path / "a.npz")["rollout_log_probs"].dtype == dtype


def test_a_column_without_an_exact_form_stays_in_its_line(tmp_path):
    samples = [Sample(tokens=["x"]), Sample(tokens=[2**40]), Sample(tokens=Compact(IDS, [7]))]  # type: ignore[list-item]
    assert [row["tokens"] for row in written(tmp_path / "a.jsonl", samples)] == [["x"], [2**40], [7]]


def test_values_that_json_lacks_are_written_plain(tmp_path):
    metadata = {"a": np.arange(2), "b": np.float32(0.5), "c": b"\xff", "d": "\ud800", "e": float("nan")}
    (row,) = written(tmp_path / "a.jsonl", [Sample(metadata=metadata)])
    assert (row["metadata"]["a"], row["metadata"]["b"], row["metadata"]["c"]) == ([0, 1], 0.5, "b'\\xff'")


def test_what_changes_after_the_call_is_not_recorded(tmp_path):
    sample = Sample(index=1, tokens=Compact(IDS, [1, 2]), metadata={"a": 1})
    records = records_of([sample])
    sample.tokens[0], sample.metadata["a"], sample.response = 9, 2, "later"
    writer = RecordWriter()
    writer.write(tmp_path / "a.jsonl", records)
    writer.flush()
    (row,) = read_records(tmp_path / "a.jsonl")
    assert (row["tokens"], row["metadata"], row["response"]) == ([1, 2], {"a": 1}, "")


def test_lines_of_an_edited_file_get_no_other_samples_columns(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    written(path, [Sample(index=i, tokens=[i]) for i in range(3)])
    path.write_text("".join(path.read_text().splitlines(keepends=True)[1:]))
    assert all("tokens" not in row for row in read_records(path))
    assert "a.npz: is not of the lines of a.jsonl any more" in capsys.readouterr().err


@pytest.mark.parametrize("damage", [lambda path: path.write_bytes(b"PK"), lambda path: path.unlink()])
def test_lines_are_read_without_their_archive(tmp_path, damage):
    path = tmp_path / "a.jsonl"
    written(path, [Sample(index=0, tokens=[1])])
    damage(tmp_path / "a.npz")
    assert [row["index"] for row in read_records(path)] == [0]


def test_the_error_of_a_file_is_raised_by_the_next_call_and_the_others_are_written(tmp_path):
    run = RunDir(tmp_path)
    run.create()
    run.rollout_file(1).mkdir()
    run.write_samples(1, [[Sample(index=0, tokens=[1])]])
    run.write_dropped(1, [([Sample(index=1, tokens=[1])], "even")])
    with pytest.raises(OSError, match="step_000001"):
        run.write_samples(2, [[Sample(index=2, tokens=[1])]])
    run.flush()
    assert [row["dropped"] for row in read_records(run.dropped_file(1))] == ["even"]
    run.release()


def test_rewinding_removes_both_files_of_later_steps(tmp_path):
    run = RunDir(tmp_path)
    run.create()
    for step in (1, 2):
        run.write_samples(step, [[Sample(index=step, tokens=[1])]])
    run.flush()
    run.rewind(1)
    assert sorted(path.name for path in (tmp_path / "rollouts").iterdir()) == [
        "step_000001.jsonl",
        "step_000001.npz",
    ]
    run.release()
