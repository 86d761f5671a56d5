"""Trainer and engine are one model: with lr 0 in fp32 their log-probs agree, and so do their weights after each sync."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from slime_core.config.load import load_settings
from slime_core.launch.local import drive
from slime_core.plugins.registry import Registry
from slime_core.run.assemble import assemble
from slime_core.weights import sync

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


def test_with_lr_0_rollout_and_trainer_agree_in_fp32(root, smollm2, tmp_path, monkeypatch):
    compared: list[tuple[dict[str, int], dict[str, int], str]] = []
    check = sync.check_fingerprints

    def spy(sent, held, *, version):
        compared.append((sent, held, version))
        check(sent, held, version=version)

    monkeypatch.setattr(sync, "check_fingerprints", spy)
    registry = Registry()
    flags = [
        "--hf-checkpoint", str(smollm2), "--output-dir", str(tmp_path), "--lr", "0", "--num-rollout", "3", "--no-bf16",
        "--eval-interval", "none", "--save-interval", "none", "--no-save-last", "--tracker", "jsonl", "--rollout-batch-size", "2",
        "--n-samples-per-prompt", "4",
    ]  # fmt: skip
    settings = load_settings([str(root / "recipes/quickstart.toml")], flags, registry=registry)

    async def main() -> None:
        await drive(await assemble(settings, registry))

    asyncio.run(main())
    rows = [json.loads(line) for line in Path(tmp_path, "quickstart/metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    assert all(0 <= row["train/train_rollout_logprob_abs_diff"] < 1e-5 for row in rows)
    assert [version for _, _, version in compared] == ["0", "1", "2", "3"]
    assert all(sent == held and len(sent) == 272 for sent, held, _ in compared)
    assert all(sent == compared[0][0] for sent, _, _ in compared)  # nothing moved
