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

pytest.register_assert_rewrite(
    "tests.servers.attacked", "tests.plugins.hostile_scores", "tests.servers.whole_runs"
)

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


@pytest.fixture
def slime_here(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run the `slime` command in this process, which spares its start, where a process is not what is tested."""
    from slime_core.cli import main

    def run(*words: object) -> subprocess.CompletedProcess[str]:
        capsys.readouterr()
        with monkeypatch.context() as patch:
            patch.syspath_prepend(os.getcwd())  # as the command does, for a user's own files
            status = main.run([*map(str, words)])
        shown = capsys.readouterr()
        return subprocess.CompletedProcess(words, status, shown.out, shown.err)

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
    from slime_models.hf.fetch import resolve

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
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random qwen3 over letters, whose projections are blocks of 128 by 128."""
    import torch
    from slime_core.testing.tabular import EOS, VOCAB
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("letters-qwen3")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=256, initializer_range=0.1,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=EOS, dtype="float32",
    )  # fmt: skip
    Qwen3ForCausalLM(config).save_pretrained(folder)
    words = WordLevel({chr(97 + i): i for i in range(EOS)} | {"end": EOS}, unk_token="a")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), eos_token="end").save_pretrained(folder)
    return folder


@pytest.fixture
def sglang_run(letters: Path, qwen3: Path) -> list[str]:
    """A command that trains `qwen3` by Megatron's trainer and an SGLang server for four steps, in float32.

    One request at a time draws from the server's own random numbers: the same ones in each run, without seeds, which
    SGLang does not heed on a CPU.
    """
    flags = {
        "hf-checkpoint": qwen3, "rollout-engine": "sglang", "train-backend": "megatron", "advantage-estimator": "grpo",
        "loss-type": "policy_loss", "loss-reducer": "sample-mean", "rm-type": "slime_bench.step.work:parity", "lr": "1e-3",
        "num-rollout": 4, "n-samples-per-prompt": 4, "rollout-max-response-len": 6, "eval-interval": 2, "save-interval": 2,
        "sglang-max-total-tokens": 4096, "sglang-max-running-requests": 4, "sglang-server-concurrency": 1,
        "sglang-random-seed": 7,
    }  # fmt: skip
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "slime_core", "train", str(letters), "--no-bf16", *words]


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
