"""The reference's scripts, and folders of the models that they name: config.json of the published sizes, and a tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
PUBLISHED = Path(__file__).parents[4] / "packages/slime-megatron/tests/settings/published_models.json"
TOKENIZER = "slime_core.testing.tabular:load_tokenizer"
#: Script -> (folder that it names, model of published_models.json).
MODELS = {
    "qwen3-4B": ("Qwen3-4B", "qwen3-4B"),
    "glm4-9B": ("GLM-Z1-9B-0414", "glm4-9B"),
    "qwen3-30B-A3B": ("Qwen3-30B-A3B", "qwen3-30B-A3B"),
    "glm4.7-355B-A32B": ("GLM-4.7-355B-A32B", "glm4.5-355B-A32B"),
    "deepseek-r1": ("DeepSeek-R1", "deepseek-v3"),
    "moonlight-16B-A3B": ("Moonlight-16B-A3B", "moonlight"),
    "qwen3-8B-opd": ("Qwen3-8B", "qwen3-8B"),
    "qwen3-235B-A22B": ("Qwen3-235B-A22B", "qwen3-235B-A22B"),
    "glm4.7-flash": ("GLM-4.7-Flash", "glm4.7-30B-A3B"),
    "kimi-k2": ("Kimi-K2-Instruct", "kimi-k2"),
    "qwen2.5-0.5B-ppo": ("Qwen2.5-0.5B-Instruct", "qwen2.5-0.5B"),
    "llama3.1-8B-tools": ("Llama-3.1-8B-Instruct", "llama3.1-8B-Instruct"),
    "qwen3-next-80B-A3B": ("Qwen3-Next-80B-A3B-Thinking", "qwen3-next-80B-A3B"),
    "mimo-7B-rl": ("MiMo-7B-RL", "mimo-7B-rl"),
    "glm5-744B-A40B": ("GLM-5", "glm5-744B-A40B"),
    "qwen2.5-32B-sft": ("Qwen2.5-32B", "qwen2.5-32B"),
}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """The folder that stands for MODELS in the scripts."""
    folder, published = tmp_path_factory.mktemp("models"), json.loads(PUBLISHED.read_text())
    for name, model in MODELS.values():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(published[model]["config"]))
    row = json.dumps({"prompt": "a", "label": "1"}) + "\n"
    for name in ("dapo-math-17k/dapo-math-17k.jsonl", "aime-2024/aime-2024.jsonl", "rl_data/aime-2024.jsonl"):
        (folder / name).parent.mkdir()
        (folder / name).write_text(row * 4)
    return folder


@pytest.fixture
def words(models):
    """Return a function that returns the words of a script, and of what is said otherwise behind them."""

    def words(name: str, *more: str) -> list[str]:
        return [*(SCRIPTS / f"{name}.txt").read_text().replace("MODELS", str(models)).split(), *more]

    return words


@pytest.fixture
def by_megatron(model, tmp_path):
    """Return a function that returns a script's words for two steps over letters by Megatron's trainer, in `tmp_path`/run."""
    rows = "".join(f'{{"input": "{a}", "label": "{chr(ord(a) + 1)}"}}\n' for a in "abcdefghij")
    (tmp_path / "letters.jsonl").write_text(rows)

    def words(**changed: object) -> list[str]:
        given = {
            "save": tmp_path / "run", "num_rollout": 2, "tracker": "jsonl", "hf_checkpoint": model, "tokenizer": "hf",
            "prompt_data": tmp_path / "letters.jsonl", "label_key": "label", "rollout_engine": "torch", "rollout_batch_size": 4,
            "n_samples_per_prompt": 4, "rollout_max_response_len": 3, "rm_type": "slime_core.testing.tabular:next_letter",
            "lr": 1e-3, "loss_type": "policy_loss", "launcher": "local", "actor_num_gpus_per_node": 1, "num_gpus_per_node": "none",
            "lr_decay_style": "constant", "logprob_diff_limit": 5, "save_interval": 1,
        }  # fmt: skip
        pairs = (given | changed).items()
        flags = (word for flag, value in pairs for word in (f"--{flag.replace('_', '-')}", str(value)))
        return ["train", "train.py", *flags, "--no-bf16"]

    return words
