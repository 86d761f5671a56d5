"""Fixtures of tests that cross packages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def slime() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the `slime` command in a process of its own."""

    def run(
        *words: str, cwd: Path | None = None, timeout: float = 550, **kwargs: Any
    ) -> subprocess.CompletedProcess[str]:
        command = [Path(sys.executable).with_name("slime"), *map(str, words)]
        return subprocess.run(
            command, cwd=cwd or ROOT, capture_output=True, text=True, timeout=timeout, **kwargs
        )

    return run


TABULAR = "slime_core.testing.tabular:"


@pytest.fixture
def letters(tmp_path: Path) -> Path:
    """A recipe whose policy is a table of letters: it learns to answer each letter with the next one, in a second."""
    (tmp_path / "model").mkdir()
    (tmp_path / "letters.jsonl").write_text(
        "".join(f'{{"input": "{a}", "label": "x"}}\n' for a in "abcdefghij")
    )
    recipe = tmp_path / "letters.toml"
    recipe.write_text(f"""
[run]
run_name = "letters"
output_dir = "{tmp_path}/runs"
num_rollout = 12
tracker = ["jsonl"]
[model]
hf_checkpoint = "{tmp_path}/model"
tokenizer = "{TABULAR}load_tokenizer"
[data]
prompt_data = "{tmp_path}/letters.jsonl"
label_key = "label"
rollout_shuffle = true
[rollout]
rollout_engine = "{TABULAR}create_engine"
rollout_batch_size = 4
n_samples_per_prompt = 16
rollout_max_response_len = 1
[reward]
rm_type = "{TABULAR}next_letter"
[algorithm]
advantage_estimator = "{TABULAR}credit"
loss_type = "{TABULAR}reinforce"
loss_reducer = "{TABULAR}per_token"
[train]
train_backend = "{TABULAR}create_trainer"
lr = 40.0
[checkpoint]
save_interval = 4
[eval]
eval_interval = 6
eval_prompt_data = ["letters", "{tmp_path}/letters.jsonl"]
""")
    return recipe


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the pretrained quickstart model."""
    from slime_models.fetch import resolve

    return resolve("smollm2-135m", progress=lambda line: None)


@pytest.fixture(scope="session")
def tiny_llama(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer llama with SmolLM2's tokenizer."""
    import shutil

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for file in smollm2.iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, folder)
    return folder


@pytest.fixture(scope="session")
def kill_after() -> Callable[[Sequence[str], Path, int], None]:
    """Returns a function that starts a command, and kills it once a file has more than so many lines."""

    def kill(command: Sequence[str], file: Path, n_lines: int) -> None:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 800
        try:
            while not (file.exists() and file.read_text().count("\n") > n_lines):
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.01)  # the command needs the cores
        finally:
            os.kill(process.pid, signal.SIGKILL)
            process.wait()

    return kill
