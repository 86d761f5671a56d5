"""TensorBoard's event files hold what `metrics.jsonl` holds, read back from their own bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def events(folder: Path) -> Iterator[Any]:
    """Events of all files of a folder, oldest file first: length, checksum, message, checksum, and so on."""
    from tensorboardX.proto.event_pb2 import Event

    for file in sorted(folder.iterdir()):
        data, at = file.read_bytes(), 0
        while at < len(data):
            (length,) = struct.unpack_from("<Q", data, at)
            yield Event.FromString(data[at + 12 : at + 12 + length])
            at += 16 + length


def shown(folder: Path) -> dict[int, dict[str, float]]:
    """What TensorBoard shows of a folder: metrics by step, without those that a later file hides."""
    found: dict[int, dict[str, float]] = {}
    for event in events(folder):
        if event.session_log.status == event.session_log.START:  # hide what is from here on
            found = {step: values for step, values in found.items() if step < event.step}
        for value in event.summary.value:
            if value.HasField("simple_value"):
                metrics = found.setdefault(event.step, {})
                assert value.tag not in metrics
                metrics[value.tag] = value.simple_value
    return found


def check_same(found: dict[int, dict[str, float]], wanted: dict[int, dict[str, float]]) -> None:
    assert sorted(found) == sorted(wanted)
    for step, metrics in wanted.items():  # TensorBoard's names have no @
        assert found[step] == pytest.approx({k.replace("@", "_"): v for k, v in metrics.items()}, rel=1e-6)


def test_each_step_of_a_resumed_run_is_shown_once(train, rows_of):
    for num_rollout in (6, 12):  # the checkpoint of step 6 is where the second begins
        run = train(num_rollout, "--use-tensorboard")
    found = shown(run / "tensorboard")
    assert sorted(found) == list(range(13))
    check_same(found, rows_of(run))


def test_steps_are_shown_once_where_a_run_begins_anew_or_again_with_nothing_saved(
    train, rows_of, monkeypatch, tmp_path
):
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "board"))
    for _ in range(2):
        run = train(2, "--use-tensorboard", "--tb-project-name", "sums", "--overwrite")
    check_same(shown(tmp_path / "board/sums/letters"), rows_of(run))


def test_the_configuration_and_samples_are_beside_the_metrics(train):
    run = train(2, "--use-tensorboard", "--log-samples", "3")
    texts: dict[str, dict[int, str]] = {}
    for event in events(run / "tensorboard"):
        for value in event.summary.value:
            if value.HasField("tensor"):
                text = bytes(value.tensor.string_val[0]).decode()
                texts.setdefault(value.tag.partition("/")[0], {})[event.step] = text
    assert "    n_samples_per_prompt = 4\n" in texts["config"][0]
    assert {step: len(text.splitlines()) for step, text in texts["samples"].items()} == {1: 5, 2: 5}
    first = json.loads((run / "rollouts/step_000002.jsonl").read_text().splitlines()[0])
    row = texts["samples"][2].splitlines()[2]
    assert row.startswith(f"| 2 | {first['group_index']} | {first['index']} | {first['prompt']} |")


@pytest.mark.parametrize(("flags", "name"), [((), "letters"), (("--tb-experiment-name", "mine"), "mine")])
def test_events_of_a_project_lie_where_the_environment_says(
    train, rows_of, monkeypatch, tmp_path, flags, name
):
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "board"))
    run = train(2, "--use-tensorboard", "--tb-project-name", "sums", *flags)
    assert not (run / "tensorboard").exists()
    check_same(shown(tmp_path / "board/sums" / name), rows_of(run))
