"""Rows of data files: slices, line numbers, and messages that say what is wrong where."""

import base64
import hashlib
import io
import json
import resource
import sys
import tempfile
from unittest import mock

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from slime_core.data.media import image_of
from slime_core.data.rows import jsonl
from slime_core.data.rows.open_rows import open_rows, parse_spec, read_rows
from slime_core.data.rows.record import Record
from slime_core.errors import DataError

from ..conftest import write_rows


def test_blank_lines_are_no_rows_and_lines_count_from_one(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('\ufeff{"a": 1}\n\n   \n{"a": "é"}\n', encoding="utf-8")
    assert read_rows(str(path)) == [
        Record(f"{path}:1", {"a": 1}, tmp_path),
        Record(f"{path}:4", {"a": "é"}, tmp_path),
    ]


@given(
    n=st.integers(1, 8),
    start=st.none() | st.integers(-10, 10),
    stop=st.none() | st.integers(-10, 10),
    kind=st.sampled_from(["jsonl", "parquet"]),
)
def test_a_slice_takes_what_it_takes_of_a_list(n, start, stop, kind, tmp_path_factory):
    path = tmp_path_factory.mktemp("slices") / f"data.{kind}"
    rows = [{"row": i} for i in range(n)]
    if kind == "jsonl":
        write_rows(path, rows)
    else:
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=3)
    bounds = ":".join("" if bound is None else str(bound) for bound in (start, stop))
    expected = rows[start:stop]
    if expected:
        records = read_rows(f"{path}@[{bounds}]")
        assert [record.values for record in records] == expected
        line = f"row {expected[0]['row'] + 1}" if kind == "parquet" else expected[0]["row"] + 1
        assert records[0].where == f"{path}:{line}"
    else:
        with pytest.raises(DataError, match=r"no row in the slice|an empty file"):
            read_rows(f"{path}@[{bounds}]")


def test_a_slice_from_the_front_does_not_look_beyond_its_end(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"a": 1}\nbroken\n')
    assert len(read_rows(f"{path}@[:1]")) == 1


@pytest.mark.parametrize(
    "spec", ["d.jsonl@[1]", "d.jsonl@[a:b]", "d.jsonl@[1:2:3]", "d.jsonl@[:1", "d.jsonl@[-:]"]
)
def test_a_malformed_slice_is_an_error(spec):
    with pytest.raises(DataError, match="malformed slice"):
        parse_spec(spec)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            b'{"a": 1}\n{"a": \n',
            r"data.jsonl:2: found '\{\"a\":', which is not JSON \(Expecting value at column",
        ),
        (b"[1]\n", "data.jsonl:1: found a JSON list; wanted one JSON object a line"),
        (b'{"a": "\xff"}\n', r"data.jsonl:1: found bytes that are not UTF-8 \(at 7\)"),
        (b"\n\n", "found an empty file"),
    ],
)
def test_a_broken_line_is_an_error_that_names_it(text, words, tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(text)
    with pytest.raises(DataError, match=words):
        read_rows(str(path))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("missing.jsonl", "found nothing; wanted a data file"),
        ("data.csv", "found a .csv file; wanted .jsonl or .parquet, or hf:NAME"),
        ("broken.parquet", "found a broken Parquet file"),
    ],
)
def test_a_file_that_cannot_be_read_is_an_error(name, words, tmp_path):
    (tmp_path / "broken.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match=words):
        read_rows(str(tmp_path / name))


@settings(max_examples=200)
@given(
    lines=st.lists(st.sampled_from([b"", b"  ", b"\t\r", b'{"a": 1}', b'  {"a": 2}', b'{"b": "x"}\r', b"\x0c"]), max_size=9),
    ends=st.booleans(),
    chunk=st.integers(1, 40),
)  # fmt: skip
def test_rows_are_the_lines_that_are_not_blank_however_the_file_is_cut(lines, ends, chunk, tmp_path_factory):
    path = tmp_path_factory.mktemp("cut") / "data.jsonl"
    path.write_bytes(b"\n".join(lines) + (b"\n" if ends else b""))
    with mock.patch.object(jsonl, "_CHUNK", chunk):
        rows = jsonl.JsonlRows(path, slice(None))
    expected = [
        (number, line) for number, line in enumerate(path.read_bytes().split(b"\n"), 1) if line.strip()
    ]
    assert [rows.place(i) for i in range(len(rows))] == [f"{path}:{number}" for number, _ in expected]
    assert [rows[i].values for i in range(len(rows))] == [json.loads(line) for _, line in expected]


def test_rows_may_be_read_in_any_order_and_are_recognised(tmp_path):
    path = tmp_path / "data.jsonl"
    write_rows(path, [{"row": i} for i in range(100)])
    rows = open_rows(f"{path}@[10:20]")
    assert [rows[i].values["row"] for i in (9, 0, 3)] == [19, 10, 13]
    assert (
        rows.digest
        == hashlib.sha256(b"".join(path.read_bytes().splitlines(keepends=True)[10:20])).hexdigest()
    )
    before = rows.digest
    path.write_text(path.read_text().replace('{"row": 5}', '{"row": 6}'))
    assert open_rows(f"{path}@[10:20]").digest == before
    path.write_text(path.read_text().replace('{"row": 15}', '{"row": 51}'))
    assert open_rows(f"{path}@[10:20]").digest != before


def test_a_row_that_is_broken_is_found_when_it_is_read(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text('{"a": 1}\n{"a": \n{"a": 3}\n')
    rows = open_rows(str(path))
    assert rows[2].values == {"a": 3}
    with pytest.raises(DataError, match=r"data.jsonl:2: found .* which is not JSON"):
        rows[1]


@pytest.fixture
def saved(tmp_path):
    """A dataset of two splits, as the library saves it."""
    table = datasets.Dataset.from_list([{"q": f"question {i}", "a": i} for i in range(20)])
    datasets.DatasetDict({"train": table, "test": table.select(range(3))}).save_to_disk(
        str(tmp_path / "saved")
    )
    return tmp_path / "saved"


def test_images_of_a_dataset_are_the_bytes_of_their_files(tmp_path):
    content = io.BytesIO()
    Image.new("RGB", (2, 3), (255, 0, 0)).save(content, "png")
    one = {"bytes": content.getvalue(), "path": None}
    features = datasets.Features(
        {"q": datasets.Value("string"), "image": datasets.Image(), "images": datasets.List(datasets.Image())}
    )
    columns = {"q": ["which colour?"], "image": [one], "images": [[one, one]]}
    datasets.Dataset.from_dict(columns, features=features).save_to_disk(str(tmp_path / "saved"))
    row = open_rows(f"hf:{tmp_path}/saved?split=train")[0].values
    assert row == {"q": "which colour?", "image": one, "images": [one, one]}
    encoded = base64.b64encode(one["bytes"]).decode()
    assert image_of(row["image"], where="row 1", root=tmp_path) == f"data:image;base64,{encoded}"


def test_rows_of_a_dataset_on_the_disk(saved):
    rows = open_rows(f"hf:{saved}@[-5:]")
    assert [rows[i].values["a"] for i in range(len(rows))] == [15, 16, 17, 18, 19]
    assert rows[1].where == f"hf:{saved}:row 17"
    held_out = open_rows(f"hf:{saved}?split=test")
    assert [held_out[i].values["q"] for i in range(3)] == ["question 0", "question 1", "question 2"]
    assert rows.digest == open_rows(f"hf:{saved}@[-5:]").digest != held_out.digest


def test_a_dataset_of_a_folder_of_files_is_read_by_the_library(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "files").mkdir()
    write_rows(tmp_path / "files/train.jsonl", [{"q": "a"}, {"q": "b"}])
    rows = open_rows(f"hf:{tmp_path / 'files'}")
    assert [rows[i].values for i in range(2)] == [{"q": "a"}, {"q": "b"}]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("{}?split=dev", "cannot read the split 'dev' of it"),
        ("{}?splitt=dev", r"found \['splitt'\]; wanted hf:NAME\?config=...&split=...&revision=..."),
        ("{}/nope", "found no such folder; wanted a folder that datasets wrote, or a name on the hub"),
    ],
)
def test_a_dataset_that_cannot_be_read_is_an_error(name, words, saved):
    with pytest.raises(DataError, match=words):
        open_rows(f"hf:{name.format(saved)}")


def test_without_the_library_the_extra_is_named(saved, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"install slime-core\[datasets\]"):
        open_rows(f"hf:{saved}")


def test_parquet_with_a_dictionary_for_each_row_group_is_read(tmp_path):
    path = tmp_path / "data.parquet"
    groups = [["a", "b", "a"], ["c", "b"]]
    with pq.ParquetWriter(path, pa.schema([("q", pa.dictionary(pa.int32(), pa.string()))])) as writer:
        for words in groups:
            writer.write_table(pa.table({"q": pa.array(words).dictionary_encode()}))
    assert [row.values["q"] for row in read_rows(str(path))] == ["a", "b", "a", "c", "b"]


def test_a_slice_of_parquet_copies_no_other_rows_and_its_copy_has_no_name(tmp_path, monkeypatch):
    """The copy may have 64 kB: of 89 rows of 10 kB it can hold the three that are wanted, and not all."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    path = tmp_path / "data.parquet"
    pq.write_table(pa.table({"q": [str(i) * 5000 for i in range(10, 99)]}), path, row_group_size=8)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        rows = open_rows(f"{path}@[6:9]")
        with pytest.raises(DataError, match=f"{folder}: found File too large .* set TMPDIR to a folder"):
            open_rows(str(path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [rows[i].values["q"][:2] for i in range(3)] == ["16", "17", "18"]
    assert list(folder.iterdir()) == []


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path):
    path = write_rows(tmp_path / "data.jsonl", [{"q": "one"}, {"q": "two"}])
    rows = open_rows(path)
    assert rows[0].values == {"q": "one"}
    write_rows(tmp_path / "other.jsonl", [{"q": "bad"}, {"q": "row"}])
    (tmp_path / "other.jsonl").replace(path)
    with pytest.raises(DataError, match=r"data.jsonl:2: found a file that has changed since it was opened"):
        rows[1]
