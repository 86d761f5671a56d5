"""`slime bench trainer`: its figures follow from one another, from lengths counted by hand, and from what torch allocates."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from slime_bench.trainer.command import trainer
from slime_core.errors import PluginError

#: A tiny Qwen 3 without weights.
CONFIG = {
    "model_type": "qwen3",
    "vocab_size": 250,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": True,
}


COLUMNS = 100


@pytest.fixture
def shape(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def measured(folder: Path, *arguments: str) -> dict[str, Any]:
    """Run the benchmark; return what it writes."""
    assert trainer([*arguments, "--json", str(folder / "figures.json")]) == 0
    found: dict[str, Any] = json.loads((folder / "figures.json").read_text())
    return found


def test_figures_of_a_model_follow_from_its_steps(qwen3, tmp_path, capsys):
    report = measured(
        tmp_path, "--model", str(qwen3[1]), "--samples", "4", "--prompt", "6", "--response", "8",
        "--max-tokens", "80", "--repeats", "2", "--peak-tflops", "0.5",
    )  # fmt: skip
    (work,) = report["work"]
    assert list(work["sides"]) == ["slime", "transformers"]
    for side in work["sides"].values():
        median = statistics.median(side["seconds"])
        assert side["tokens_per_s"] == pytest.approx(work["tokens"] / median)
        assert side["mfu"] == pytest.approx(work["flops"] / median / 0.5e12)
        assert side["peak_bytes"] is None or side["peak_bytes"] >= side["held_bytes"]
    printed = capsys.readouterr().out.splitlines()
    assert max(map(len, printed[1:])) <= COLUMNS  # the first line names a folder
    assert printed[1] == "peak 0.5 TFLOP/s: given by --peak-tflops"
    rates = [f"{side['tokens_per_s']:.0f}" for side in work["sides"].values()]
    assert all(rate in line for rate, line in zip(rates, printed[4:6], strict=True))


def test_a_shape_without_weights_is_measured_at_each_length(shape, tmp_path, capsys):
    report = measured(
        tmp_path, "--shape", str(shape), "--sequence", "16,48", "--peer", "none", "--repeats", "1"
    )
    assert [(work["samples"], work["tokens"]) for work in report["work"]] == [
        ("3 of 16", 48),
        ("1 of 48", 48),
    ]
    assert all(list(work["sides"]) == ["slime"] for work in report["work"])
    assert all(work["sides"]["slime"]["padding_frac"] == 0 for work in report["work"])
    # A layer's matrices: 64 x (128 + 2 x 64) + 128 x 64 + 3 x 64 x 112 weights, 46,080; two layers; 250 ids x 64.
    # 47 tokens are forwarded of a sample of 48, all predict one; 47 x 48 / 2 pairs, twice 128 products each and layer.
    assert report["work"][1]["flops"] == 3 * 2 * (
        2 * 46080 * 47 + 2 * 2 * 128 * (47 * 48 // 2) + 250 * 64 * 47
    )
    assert report["parameters"] == 2 * (46080 + 2 * 64 + 2 * 32) + 64 + 250 * 64
    assert "products of two 2048 x 2048 matrices" in capsys.readouterr().out or torch.cuda.is_available()


def test_conversations_are_measured_beside_their_samples_each_by_itself(shape, tmp_path, capsys):
    report = measured(
        tmp_path, "--shape", str(shape), "--shared", "75", "--samples", "8", "--prompt", "10", "--response", "34",
        "--peer", "none", "--repeats", "1", "--clock", "cpu",
    )  # fmt: skip
    (work,) = report["work"]
    assert (list(work["sides"]), work["samples"]) == (["slime", "alone"], "8 of 10 + 34, 75% shared")
    printed = capsys.readouterr().out
    assert "median of 1 steps by CPU time" in printed and re.search(
        r"slime \d+\.\d\d times as fast as alone", printed
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shape", "7b"], "--shape 7b: wanted 0.6b, moe, or a folder with a config.json"),
        (["--shape", "0.6b", "--model", "x"], "not allowed with argument"),
        (["--sequence", "4096,many"], "--sequence 4096,many: .*; wanted numbers of tokens as in 4096,16384"),
        (["--sequence", "0"], "--sequence 0: 0; wanted at least 1"),
        (["--sequence", "1"], "wanted at least 2 tokens"),
        (["--shared", "90"], "--shared 90: wanted 45 to 85"),
        (["--shared", "75", "--samples", "12"], r"that eight divides \(not 12\)"),
        (["--repeats", "0"], "argument --repeats: 0; wanted at least 1"),
        (["--peak-tflops", "0"], "--peak-tflops 0.0; wanted more than 0"),
    ],
)
def test_bad_arguments_are_refused_before_anything_starts(arguments, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        trainer(arguments)
    printed = capsys.readouterr().err
    assert re.search(said, printed), printed


def test_a_shape_of_another_family_is_refused_by_name(shape):
    (shape / "config.json").write_text(json.dumps(CONFIG | {"model_type": "gpt_neox"}))
    with pytest.raises(PluginError, match="no plugin is named 'gpt_neox'"):
        trainer(["--shape", str(shape)])
