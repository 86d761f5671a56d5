"""What W&B writes offline holds what `metrics.jsonl` holds, read back from its own files."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

OFFLINE = ("--use-wandb", "--wandb-mode", "offline")


def parts(data: bytes) -> Iterator[bytes]:
    """Records of a .wandb file: 7 bytes, then blocks of 32 KiB (LevelDB's log) of checksum, length, kind, bytes."""
    at, record = 7, b""
    while at < len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def records(folder: Path, kind: str) -> list[Any]:
    """Records of one kind of all runs in a folder, oldest first."""
    from wandb.proto.wandb_internal_pb2 import Record

    found = []
    for file in sorted(folder.glob("offline-run-*/*.wandb")):
        deadline = time.monotonic() + 60
        while True:  # a process of W&B's writes it, and may do so after `finish` has returned
            of_file = [Record.FromString(part) for part in parts(file.read_bytes())]
            if any(record.WhichOneof("record_type") == "exit" for record in of_file):
                break
            assert time.monotonic() < deadline, f"{file} has no end"
            time.sleep(0.05)
        found += of_file
    return [getattr(record, kind) for record in found if record.WhichOneof("record_type") == kind]


def history(folder: Path) -> dict[int, dict[str, float]]:
    """Metrics by step."""
    found = {}
    for record in records(folder, "history"):
        items = {item.nested_key[0]: json.loads(item.value_json) for item in record.item}
        step = items.pop("step")
        found[step] = {key: value for key, value in items.items() if not key.startswith(("_", "samples"))}
    return found


@pytest.mark.slow
def test_every_metric_is_there_and_a_resumed_run_is_the_same_run(train, rows_of):
    for num_rollout in (6, 12):
        run = train(num_rollout, *OFFLINE, "--wandb-project", "letters")
    ids = {(record.run_id, record.project) for record in records(run / "wandb", "run")}
    assert ids == {((run / "wandb_id").read_text().strip(), "letters")}
    assert history(run / "wandb") == {step: pytest.approx(metrics) for step, metrics in rows_of(run).items()}
    tables = [json.loads(file.read_text()) for file in (run / "wandb").rglob("media/table/samples_*.json")]
    assert sorted({row[0] for table in tables for row in table["data"]}) == list(range(1, 13))
    assert {len(table["data"]) for table in tables} == {8}


@pytest.mark.slow
def test_settings_name_group_and_id_are_those_of_the_run(train, tmp_path):
    run = train(1, *OFFLINE, "--wandb-group", "sums", "--wandb-run-id", "abcd", "--wandb-dir", str(tmp_path))
    (record, *_) = records(tmp_path / "wandb", "run")
    assert (record.display_name, record.run_group, record.run_id) == ("letters", "sums", "abcd")
    assert (run / "wandb_id").read_text() == "abcd\n"
    config = {item.key: json.loads(item.value_json) for item in record.config.update}
    assert config["rollout"]["n_samples_per_prompt"] == 4
    (ended,) = records(tmp_path / "wandb", "exit")
    assert ended.exit_code == 0


@pytest.mark.slow
def test_a_run_that_fails_is_marked_as_one_that_failed(train, tmp_path):
    with pytest.raises(Exception, match="reward"):
        train(
            2,
            *OFFLINE,
            "--wandb-dir",
            str(tmp_path),
            "--rm-type",
            "slime_core.testing.tabular:load_tokenizer",
        )
    (ended,) = records(tmp_path / "wandb", "exit")
    assert ended.exit_code == 1
