"""The reference's flags for one half of a run, over the tabular policy: samples that were dumped are trained on again."""

from __future__ import annotations

import json
from pathlib import Path

from slime_core.cli.main import run as slime

TABULAR = "slime_core.testing.tabular:"


def words(folder: Path, name: str, *more: str) -> list[str]:
    given = {
        "save": folder / name, "num-rollout": 2, "tracker": "jsonl", "hf-checkpoint": folder / "model",
        "tokenizer": f"{TABULAR}load_tokenizer", "prompt-data": folder / "letters.jsonl", "label-key": "label",
        "rollout-engine": f"{TABULAR}create_engine", "rollout-batch-size": 4, "n-samples-per-prompt": 4,
        "rollout-max-response-len": 1, "rm-type": f"{TABULAR}next_letter", "advantage-estimator": f"{TABULAR}credit",
        "loss-reducer": f"{TABULAR}per_token", "train-backend": f"{TABULAR}create_trainer", "lr": 40.0, "launcher": "local",
        "actor-num-gpus-per-node": 1, "num-gpus-per-node": "none", "save-interval": 1, "lr-decay-style": "constant",
        "set": f"algorithm.loss_type={TABULAR}reinforce",
    }  # fmt: skip
    return [
        "train",
        "train.py",
        *(str(w) for flag, value in given.items() for w in (f"--{flag}", value)),
        *more,
    ]


def test_a_run_a_run_without_a_trainer_and_a_run_on_its_dump(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "letters.jsonl").write_text(
        "".join(f'{{"input": "{a}", "label": "x"}}\n' for a in "abcdefghij")
    )
    dump = f"{tmp_path}/dump/rollout_data/{{rollout_id}}.pt"
    assert slime(words(tmp_path, "whole", "--dump-details", f"{tmp_path}/dump")) == 0
    assert (tmp_path / "dump/rollout_data/1.pt").is_file()
    without_trainer = words(tmp_path, "rollout", "--debug-rollout-only")
    at = without_trainer.index("--train-backend")
    del without_trainer[at : at + 2]
    assert slime(without_trainer) == 0
    rows = [json.loads(line) for line in (tmp_path / "rollout/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2] and not any(
        name.startswith("train/") for row in rows for name in row
    )
    again = words(tmp_path, "again", "--load-debug-rollout-data", dump)
    at = again.index("--rollout-engine")
    del again[at : at + 2]
    assert slime(again) == 0
    whole, trained = (
        [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        for name in ("whole", "again")
    )
    for was, row in zip(whole, trained, strict=True):
        assert {k: v for k, v in row.items() if k.startswith("train/")} == {
            k: v for k, v in was.items() if k.startswith("train/")
        }
