"""`slime bench trainer`: its figures follow from one another, from lengths counted by hand, and from what torch allocates."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from slime_core.errors import PluginError
from slime_megatron.bench import trainer
from slime_megatron.bench_work import SHAPES, Lengths, Transformers, random_batch
from slime_megatron.memory import bytes_in_use, peak_bytes
from slime_models.families.qwen3 import QWEN3

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


def test_padding_of_transformers_is_what_its_micro_batches_are_padded_by(qwen3):
    lengths = Lengths(np.array([2, 2, 4]), np.array([3, 7, 6]), "three")
    side = Transformers(qwen3[1], torch.device("cpu"), max_tokens=1000)
    assert side.step(random_batch(lengths, vocab_size=250))() == pytest.approx(
        6 / 30
    )  # 5, 9 and 10 tokens in 3 x 10


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


def test_peak_of_memory_is_that_of_a_tensor_that_is_gone():
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    before = bytes_in_use(device)
    assert before is not None, "this system does not tell; wanted Linux, or CUDA"
    tensor = torch.ones(25_000_000, device=device)
    size = tensor.nbytes
    del tensor
    peak = peak_bytes(device)
    assert peak is not None
    assert size * 0.99 < peak - before < size * 1.2
    after = bytes_in_use(device)
    assert after is not None
    assert abs(after - before) < size * 0.1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shape", "7b"], "--shape 7b: wanted 0.6b, or a folder with a config.json"),
        (["--shape", "0.6b", "--model", "x"], "not allowed with argument"),
        (["--sequence", "4096,many"], "--sequence 4096,many: .*; wanted numbers of tokens as in 4096,16384"),
        (["--sequence", "0"], "--sequence 0: 0; wanted at least 1"),
        (["--sequence", "1"], "wanted at least 2 tokens"),
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


def test_the_published_shape_has_the_published_parameters():
    """Qwen3-0.6B: 0.6 billion, 0.44 without the embedding (its model card)."""
    architecture = QWEN3.architecture(SHAPES["0.6b"])
    sizes = {name: weight.shape for name, weight in QWEN3.weights(architecture).items()}
    count = {name: torch.Size(shape).numel() for name, shape in sizes.items()}
    assert round(sum(count.values()) / 1e9, 1) == 0.6
    without = sum(n for name, n in count.items() if "embedding" not in name)
    assert round(without / 1e9, 2) == 0.44
