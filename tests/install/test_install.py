"""Wheels built here, installed into fresh environments as the README says: each package and each documented combination."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

#: What the README's table tells to install -> (what must be listed, what must not be there).
COMBINATIONS = {
    "slime-core": ({"slime.loops sync"}, ("torch", "ray", "transformers", "sympy")),
    "slime-core slime-rm": ({"slime.rewards math"}, ("torch", "ray", "transformers")),
    "slime-core slime-gym": ({"slime.sources gym", "slime.rewards gym"}, ("torch", "ray", "transformers")),
    "slime-algos": ({"slime.advantages grpo", "slime.losses policy_loss"}, ("transformers", "megatron")),
    "slime-models[smollm2]": ({"slime.models llama", "slime.tokenizers hf"}, ("megatron",)),
    "slime-simulator": ({"slime.commands simulate", "slime.commands plan"}, ("torch", "transformers")),
    "slime-bench": ({"slime.benches step"}, ("torch",)),
    "slime-megatron slime-torch slime-algos slime-example-family": (
        {"slime.trainers megatron", "slime.engines torch", "slime.models qwen3", "slime.models gemma3_text"},
        ("sglang", "ray"),
    ),
    "slime-sglang": (set(), ("megatron",)),
    "slime-trackers": (
        {"slime.trackers wandb", "slime.trackers tensorboard"},
        ("torch", "ray", "transformers"),
    ),
    "slime-agents slime-compat": (
        {"slime.generators agent", "slime.generators tool-loop", "slime.commands import-verl"},
        ("torch", "ray", "transformers", "megatron", "sglang"),
    ),
    "slime-kernels": (
        {"slime.generators kernel-turns", "slime.rewards kernels", "slime.sources kernelbench"},
        ("ray", "transformers", "megatron", "sglang"),
    ),
    "slime-ray": ({"slime.launchers ray"}, ("megatron", "transformers", "sglang")),
}
#: Those that are tried with the tests that take long.
RARER = {
    "slime-core slime-rm",
    "slime-megatron slime-torch slime-algos slime-example-family",
    "slime-agents slime-compat",
    "slime-kernels",
    "slime-sglang",
    "slime-core slime-gym",
    "slime-algos",
    "slime-models[smollm2]",
    "slime-simulator",
    "slime-bench",
    "slime-trackers",
}
#: What the README's command installs, by pip itself; the others go through uv's cache.
BY_PIP = "slime-core slime-rm"


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    """The wheels of every package."""
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run(
        ["uv", "build", "--all-packages", "--wheel", "--quiet", "-o", folder], cwd=root, check=True
    )
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where each test makes its environment anew, so that what is the same file in several is compiled once."""
    return tmp_path_factory.mktemp("place")


def outside(place: Path) -> dict[str, str]:
    """Return environment variables that know nothing of this environment."""
    kept = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return kept | {"PYTHONPYCACHEPREFIX": str(place / "compiled"), "PIP_NO_COMPILE": "1"}


def environment(place: Path, dist: Path, names: str) -> Path:
    """Make a fresh environment with `names` installed; returns its interpreter."""
    folder = place / "env"
    shutil.rmtree(folder, ignore_errors=True)
    python = folder / "bin" / "python"
    if names == BY_PIP:
        make, install = [sys.executable, "-m", "venv"], [python, "-m", "pip", "install"]
    else:
        make, install = ["uv", "venv", "--quiet", "--python", sys.executable], ["uv", "pip", "install"]
        # uv's cache may have older wheels of the same version, from a folder of this name that was there before.
        install += [
            f"--refresh-package={wheel.name.partition('-')[0]}" for wheel in sorted(dist.glob("*.whl"))
        ]
    subprocess.run([*make, folder], check=True, env=outside(place))
    command = [*install, "--quiet", "--find-links", dist, *names.split()]
    subprocess.run(command, check=True, cwd=folder, env=outside(place) | {"VIRTUAL_ENV": str(folder)})
    return python


def run(python: Path, *words: str) -> str:
    """Run a program of a fresh environment, away from the repository."""
    folder = python.parents[1]
    result = subprocess.run(
        [python, *words], capture_output=True, text=True, cwd=folder, env=outside(folder.parent)
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.parametrize(
    "names", [pytest.param(names, marks=[pytest.mark.faults] * (names in RARER)) for names in COMBINATIONS]
)
def test_combination_installs_and_lists_its_plugins(names, dist, place):
    listed, absent = COMBINATIONS[names]
    python = environment(place, dist, names)
    answer = json.loads(run(python, "-m", "slime_core", "plugins", "list", "--json"))
    assert listed <= {f"{p['group']} {p['name']}" for p in answer["plugins"]}
    assert answer["broken_hooks"] == {}
    assert all(p["version"] == "0.1.0" for p in answer["plugins"])
    code = f"import importlib.util as u; print([m for m in {absent!r} if u.find_spec(m)])"
    assert run(python, "-c", code).strip() == "[]"
    checked = run(python, "-m", "slime_core", "plugins", "check")
    assert "bad" not in checked.split()
    assert "nothing is missing" in run(python, "-m", "slime_core", "doctor")


def test_every_package_is_installed_by_some_combination(root):
    tested = {name.partition("[")[0] for names in COMBINATIONS for name in names.split()}
    packages = {path.parent.name for path in root.glob("p*/*/pyproject.toml")}
    assert packages - {"slime-example-reward"} == tested  # that one has a test of its own


def test_example_reward_plugin_needs_slime_core_alone(dist, place, tmp_path, letters):
    python = environment(place, dist, "slime-example-reward")
    table = run(python, "-m", "slime_core", "plugins")
    assert "ends-with-label" in table
    run(
        python,
        "-m",
        "slime_core",
        "train",
        str(letters),
        "--rm-type",
        "ends-with-label",
        "--num-rollout",
        "2",
    )
    samples = (tmp_path / "runs/letters/rollouts/step_000001.jsonl").read_text().splitlines()
    for sample in map(json.loads, samples):
        assert sample["reward"] == float(sample["response"].strip().endswith(sample["label"]))


@pytest.fixture
def gemma3(tmp_path: Path) -> Path:
    """A random Gemma 3 over letters: two of three layers see 4 tokens."""
    import torch
    from slime_core.testing.tabular import EOS, VOCAB
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=VOCAB, hidden_size=48, intermediate_size=80, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=64, sliding_window=4, query_pre_attn_scalar=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"], initializer_range=0.2,
        pad_token_id=None, bos_token_id=None, eos_token_id=EOS,
    )  # fmt: skip
    Gemma3ForCausalLM(config).save_pretrained(tmp_path / "gemma3")
    return tmp_path / "gemma3"


@pytest.mark.faults
def test_example_family_trains_from_its_wheel_by_megatron_and_torch(dist, place, letters, gemma3):
    """Two steps of GRPO: before each the engine, which was sent the first one's weights, has the log-probs of the trainer."""
    python = environment(place, dist, "slime-megatron slime-torch slime-algos slime-example-family")
    flags = {
        "hf-checkpoint": gemma3, "rollout-engine": "torch", "train-backend": "megatron", "advantage-estimator": "grpo",
        "loss-type": "policy_loss", "loss-reducer": "sample-mean", "num-rollout": 2, "lr": "1e-2",
        "rollout-max-response-len": 6, "save-interval": "none", "eval-interval": "none",
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    run(python, "-m", "slime_core", "train", str(letters), "--no-bf16", *words)
    rows = [
        json.loads(line) for line in (letters.parent / "runs/letters/metrics.jsonl").read_text().splitlines()
    ]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["train/grad_norm"] > 0 and row["train/skipped_steps"] == 0 for row in rows)
    assert all(row["train/train_rollout_logprob_abs_diff/worst_sample"] <= 1e-5 for row in rows)


def test_wheels_name_the_core_with_its_range(dist):
    for wheel in dist.glob("*.whl"):
        if not wheel.name.startswith("slime_core"):
            metadata = subprocess.run(
                [sys.executable, "-m", "zipfile", "-e", wheel, dist / wheel.stem],
                check=True,
                capture_output=True,
            )
            assert metadata.returncode == 0
            text = next((dist / wheel.stem).glob("*.dist-info/METADATA")).read_text()
            assert "Requires-Dist: slime-core<0.2,>=0.1" in text, wheel.name
