"""Values of Parquet that JSON has no form for: refused by file and row where they would go into samples."""

from __future__ import annotations

import datetime
import decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from slime_core.data.prompts import PromptFormat, build_prompts
from slime_core.data.rows.open_rows import open_rows, read_rows
from slime_core.errors import DataError

from ..byte_tokenizer import ByteTokenizer

ODD = [
    datetime.datetime(2020, 1, 1),
    datetime.timedelta(seconds=3),
    decimal.Decimal("1.5"),
    b"raw",
    float("nan"),
]


@pytest.fixture
def built(tmp_path):
    """Build the prompts of a Parquet file, of a good row and then one with columns of its own."""

    def of(**columns):
        rows = {"input": ["a", "b"]} | {name: [None, value] for name, value in columns.items()}
        pq.write_table(pa.table(rows), tmp_path / "rows.parquet")
        records = read_rows(str(tmp_path / "rows.parquet"))
        return build_prompts(records, ByteTokenizer(), prompt_format=PromptFormat(label_key="label"))

    return of


@pytest.mark.parametrize("value", ODD)
@pytest.mark.parametrize("column", ["metadata", "tools"])
def test_what_json_has_no_form_for_is_refused_in_metadata_and_tools(built, column, value):
    inside = {"a": [value]} if column == "metadata" else [{"a": value}]
    with pytest.raises(DataError, match=rf"rows.parquet:row 2: found .* in '{column}'; wanted what JSON has"):
        built(label="x", **{column: inside})


def test_a_label_of_bytes_is_refused(built):
    with pytest.raises(
        DataError, match=r"rows.parquet:row 2: found bytes in 'label'; wanted a label that is text"
    ):
        built(label=b"raw")


@pytest.mark.parametrize(
    ("table", "name"),
    [
        (pa.table([pa.array(["a"]), pa.array(["b"])], names=["input", "input"]), "input"),
        (
            pa.table({"a": pa.array([[]], pa.list_(pa.struct([pa.field("x", pa.int8()), pa.field("x", pa.int8())])))}),
            "a.element.x",
        ),
    ],
)  # fmt: skip
def test_a_column_twice_is_refused(tmp_path, table, name):
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=f"found the column '{name}' twice; wanted each name once"):
        open_rows(str(tmp_path / "rows.parquet"))
