"""Trackers of other programs hold what `metrics.jsonl` holds, read back from their own files."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def rows(run: Path) -> dict[int, dict[str, float]]:
    """Metrics by step."""
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line.pop("step"): line for line in lines}


def events(folder: Path) -> Iterator[Any]:
    """Events of all files of a folder, oldest file first: length, checksum, message, checksum, and so on."""
    from tensorboardX.proto.event_pb2 import Event

    for file in sorted(folder.iterdir()):
        data, at = file.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            yield Event.FromString(data[at + 12 : at + 12 + length])
            at += 16 + length


def wandb_records(data: bytes) -> Iterator[bytes]:
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


def test_tensorboard_shows_each_step_of_a_resumed_run_once(letters, slime, tmp_path):
    flags = ["--use-tensorboard", "--run-name", "board"]
    for num_rollout in (6, 12):  # the checkpoint of step 6 is where the second begins
        done = slime("train", letters, *flags, "--num-rollout", num_rollout)
        assert done.returncode == 0, done.stderr
    found: dict[int, dict[str, float]] = {}
    for event in events(tmp_path / "runs/board/tensorboard"):
        if event.session_log.status == event.session_log.START:  # hide what is from here on
            found = {step: values for step, values in found.items() if step < event.step}
        for value in event.summary.value:
            if value.HasField("simple_value"):
                metrics = found.setdefault(event.step, {})
                assert value.tag not in metrics
                metrics[value.tag] = value.simple_value
    wanted = rows(tmp_path / "runs/board")
    assert sorted(found) == sorted(wanted) == list(range(13))
    for step, metrics in wanted.items():  # TensorBoard's names have no @
        assert found[step] == pytest.approx({k.replace("@", "_"): v for k, v in metrics.items()}, rel=1e-6)


def test_wandb_offline_holds_every_metric_and_a_resumed_run_is_the_same_run(letters, slime, tmp_path):
    from wandb.proto.wandb_internal_pb2 import Record

    flags = ["--use-wandb", "--wandb-mode", "offline", "--wandb-project", "letters", "--run-name", "bee"]
    for num_rollout in (6, 12):
        done = slime("train", letters, *flags, "--num-rollout", num_rollout)
        assert done.returncode == 0, done.stderr
    found, ids = {}, set()
    for file in sorted((tmp_path / "runs/bee/wandb").glob("offline-run-*/*.wandb")):
        for record in map(Record.FromString, wandb_records(file.read_bytes())):
            if record.WhichOneof("record_type") == "run":
                ids.add((record.run.run_id, record.run.project))
            if record.WhichOneof("record_type") == "history":
                items = {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                step = items.pop("step")
                found[step] = {k: v for k, v in items.items() if not k.startswith("_")}
    assert ids == {((tmp_path / "runs/bee/wandb_id").read_text().strip(), "letters")}
    assert found == {step: pytest.approx(metrics) for step, metrics in rows(tmp_path / "runs/bee").items()}
