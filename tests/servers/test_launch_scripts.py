"""Launch scripts of the reference system, as they stand but for sizes: Megatron, SGLang and Ray together, two steps."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from slime_core.plugins.registry import Registry
from slime_megatron.checkpoint.convert import to_megatron

from .attacked import writers_below
from .whole_runs import metrics, samples

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(1800)]

SCRIPTS = Path(__file__).parents[2] / "plugins/slime-compat/tests/launch/scripts"
#: Sizes of tiny models, as config.json and as the scripts' arguments say them; the last of two values holds, as in argparse.
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16,
}  # fmt: skip
MODEL = (
    "--num-layers 2 --hidden-size 64 --ffn-hidden-size 96 --num-attention-heads 4 --num-query-groups 2 --kv-channels 16 "
    "--vocab-size 49152"
)
#: Less of everything, on two processes of this machine.
LESS = (
    "--actor-num-gpus-per-node 2 --tensor-model-parallel-size 2 --context-parallel-size 1 --num-rollout 2 --save-interval 1 "
    "--rollout-batch-size 2 --n-samples-per-prompt 2 --global-batch-size 4 --rollout-max-response-len 8 --max-tokens-per-gpu 256 "
    "--n-samples-per-eval-prompt 1 --eval-max-response-len 8 --eval-interval 2 --sglang-mem-fraction-static 0.9"
)


def words_of(name: str, models: Path, more: str) -> list[str]:
    """Return the arguments of a script, and what is said otherwise behind them."""
    text = (SCRIPTS / f"{name}.txt").read_text().replace("MODELS", str(models))
    return [*" ".join(text.splitlines()[1:]).split(), *more.split()]


@pytest.fixture
def models(tmp_path, smollm2):
    """A folder with the prompts that the scripts name."""
    rows = [
        {"prompt": [{"role": "user", "content": f"What is {n} + {n}?"}], "label": str(2 * n)}
        for n in range(8)
    ]
    for name in ("dapo-math-17k/dapo-math-17k.jsonl", "aime-2024/aime-2024.jsonl"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(
            "".join(json.dumps(row) + "\n" for row in rows[: 2 if "aime" in name else 8])
        )
    return tmp_path


def make_model(folder: Path, smollm2: Path, config: transformers.PretrainedConfig) -> None:
    """Write a random model of a family, with a tokenizer that fits."""
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(smollm2 / name, folder / name)


def finish(program: str, words: list[str], folder: Path) -> str:
    """Run a script to its end; returns what it printed."""
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    ended = subprocess.run(
        [sys.executable, "-m", program, *words], cwd=folder, env=env, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


def test_the_script_of_qwen3_4b_starts_from_its_megatron_folder_and_goes_on_from_its_own(models, smollm2):
    config = transformers.Qwen3Config(
        **SIZES,
        vocab_size=49152,
        rope_theta=1e6,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        eos_token_id=2,
    )
    make_model(models / "Qwen3-4B", smollm2, config)
    to_megatron(models / "Qwen3-4B", models / "Qwen3-4B_torch_dist", Registry.from_environment())
    words = words_of("qwen3-4B", models, f"{MODEL} {LESS}")
    printed = finish("slime_compat.train", words, models)
    run = models / "Qwen3-4B_slime"
    assert "needs no conversion" not in printed and "warning: --load" not in printed
    rows = metrics(run)
    assert [row["step"] for row in rows] == [0, 1, 2] and json.loads((run / "summary.json").read_text())[
        "steps"
    ] == 2
    assert all(row["train/train_rollout_logprob_abs_diff"] < 0.1 for row in rows[1:])
    assert all(len(samples(run, step)) == 4 for step in (1, 2))
    assert (run / "ranks/machine_000.log").is_file() and len(list((run / "sglang").glob("*.log"))) == 1
    printed = finish("slime_compat.train", [*words, "--num-rollout", "3"], models)
    assert json.loads((run / "summary.json").read_text())["steps"] == 3
    assert "next step is 3" in (run / "log.txt").read_text() and "actor_load" not in printed
    assert writers_below(run) == []


def test_the_script_of_glm4_9b_trains_beside_its_engines_a_step_ahead(models, smollm2):
    config = transformers.Glm4Config(
        **SIZES, vocab_size=49152, rope_theta=1e4, rms_norm_eps=1e-5, attention_bias=True, partial_rotary_factor=0.5,
        tie_word_embeddings=False, pad_token_id=0, eos_token_id=2, max_position_embeddings=32768,
    )  # fmt: skip
    make_model(models / "GLM-Z1-9B-0414", smollm2, config)
    more = f"{MODEL} {LESS} --rollout-num-gpus 1 --rollout-num-gpus-per-engine 1"
    printed = finish("slime_compat.train_async", words_of("glm4-9B", models, more), models)
    run = models / "GLM-Z1-9B-0414_slime"
    assert "need no conversion here" in printed
    assert [row["step"] for row in metrics(run)] == [0, 1, 2]
    assert metrics(run)[2]["rollout/staleness/max"] == 1
    assert writers_below(run) == []
