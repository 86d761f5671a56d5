"""Runs of the engine `torch` and the trainer `megatron` on two cores, and the costs that some of them have in common."""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from slime_core.config.load import load_settings
from slime_core.launch.local import drive, launch
from slime_core.plugins.registry import Registry
from slime_core.testing.tabular import EOS, VOCAB
from slime_simulator.costs.costs import Costs
from slime_simulator.costs.recorded import RecordedRun

_TABULAR = "slime_core.testing.tabular:"
_SLOTS = 16
#: Different prompts, and their letters at least and at most.
_PROMPTS, _SHORTEST, _LONGEST = 256, 16, 48
#: A llama of 10.6 million parameters over letters, whose random weights end about each 27th token: lengths with a long tail.
MODEL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 6,
    "num_attention_heads": 6, "num_key_value_heads": 3, "max_position_embeddings": 512, "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": EOS, "initializer_range": 0.02, "dtype": "float32",
}  # fmt: skip
#: A learning rate at which lengths stay as they are.
_FLAGS = {
    "tokenizer": f"{_TABULAR}load_tokenizer", "label-key": "label", "rm-type": "slime_bench.step.work:parity",
    "reward-workers": "1", "rollout-engine": "torch", "torch-max-running-requests": str(_SLOTS), "torch-num-threads": "1",
    "train-backend": "megatron", "advantage-estimator": "grpo", "loss-type": "policy_loss", "loss-reducer": "sample-mean",
    "lr": "1e-6", "tracker": "jsonl",
}  # fmt: skip


@dataclass(frozen=True)
class Configuration:
    """What is varied."""

    loop: str
    prompts: int
    """Of a step."""
    samples: int
    """Of a prompt."""
    tokens: int
    """Of a response at most."""
    flags: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """How a table calls it."""
        words = {"--max-staleness": "old by", "--rollout-in-completion-order": "as completed"}
        more = [words.get(flag, flag) for flag in self.flags if flag != "--update-weights-in-flight"]
        return f"{self.loop}, {self.prompts} x {self.samples}, {self.tokens} tokens {' '.join(more)}".strip()


def _async(prompts: int, samples: int, tokens: int, *flags: str) -> Configuration:
    return Configuration("fully-async", prompts, samples, tokens, ("--max-staleness", *flags))


_AS_COMPLETED = "--rollout-in-completion-order"
#: From what costs are fitted: few requests and many, each part alone; and both parts at work.
FITTED = (
    Configuration("sync", 4, 2, 128),
    Configuration("sync", 16, 4, 96),
    Configuration("one-step-off", 8, 4, 96),
)
#: What is predicted.
PREDICTED = (
    Configuration("sync", 4, 4, 96),
    Configuration("sync", 16, 4, 64),
    Configuration("sync", 8, 8, 64),
    Configuration("sync", 8, 2, 128),
    Configuration("one-step-off", 8, 4, 64),
    Configuration("one-step-off", 16, 4, 64),
    Configuration("one-step-off", 4, 8, 96),
    _async(8, 4, 96, "1"),
    _async(8, 4, 64, "2", _AS_COMPLETED),
    _async(16, 4, 48, "1"),
    _async(8, 8, 64, "2", "--update-weights-in-flight", "continue"),
    _async(4, 8, 96, "4", _AS_COMPLETED, "--update-weights-in-flight", "keep"),
)


def mixed(fitted: Sequence[Configuration], predicted: Sequence[Configuration]) -> list[Configuration]:
    """Return the order of the runs: each fitted one in the middle of its share of the predicted ones.

    A machine that gets faster or slower with time, and a process whose memory is in use already, then favour neither.
    """
    order = []
    for number, each in enumerate(fitted):
        first, last = (len(predicted) * end // len(fitted) for end in (number, number + 1))
        middle = (first + last) // 2
        order += [*predicted[first:middle], each, *predicted[middle:last]]
    return order


def run_all(root: Path, configurations: Sequence[Configuration], *, steps: int) -> dict[Configuration, Path]:
    """Run configurations one after the other in this process, after one that warms up; returns their folders.

    Engine and trainer get a thread each: one core of two.

    Raises:
        ConfigError: a part is not installed.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # heeded as torch is imported
    registry = Registry.from_environment()
    names = [f"run-{number:02d}" for number in range(len(configurations))]
    wanted = [
        ("warm-up", FITTED[0], 2),
        *((name, each, steps) for name, each in zip(names, configurations, strict=True)),
    ]
    settings = [
        load_settings([], words_of(root, each, name, steps=n), registry=registry) for name, each, n in wanted
    ]
    write_inputs(root)
    for (name, each, _), one in zip(wanted, settings, strict=True):
        print(f"{name}: {each.name}", file=sys.stderr, flush=True)
        with contextlib.redirect_stdout(None):
            launch(one, Registry.from_environment(), drive)
    return {each: root / "runs" / name for name, each in zip(names, configurations, strict=True)}


def write_inputs(root: Path) -> None:
    """Write the model and the prompts into a folder, which is made."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    root.mkdir(parents=True, exist_ok=True)
    disable_progress_bar()  # type: ignore[no-untyped-call]  # transformers leaves it so
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**MODEL)).save_pretrained(root / "model")  # type: ignore[no-untyped-call]  # as above
    drawn = random.Random(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    rows = ("".join(drawn.choices(letters, k=drawn.randint(_SHORTEST, _LONGEST))) for _ in range(_PROMPTS))
    lines = (json.dumps({"input": row, "label": ""}) + "\n" for row in rows)
    (root / "prompts.jsonl").write_text("".join(lines))


def words_of(root: Path, each: Configuration, name: str, *, steps: int) -> list[str]:
    """Return the flags of a configuration's run."""
    flags = _FLAGS | {
        "hf-checkpoint": str(root / "model"), "prompt-data": str(root / "prompts.jsonl"), "output-dir": str(root / "runs"),
        "run-name": name, "num-rollout": str(steps), "loop": each.loop, "rollout-batch-size": str(each.prompts),
        "n-samples-per-prompt": str(each.samples), "rollout-max-response-len": str(each.tokens),
    }  # fmt: skip
    words = [word for key, value in flags.items() for word in (f"--{key}", value)]
    return [*words, "--no-bf16", "--no-save-last", *each.flags]


def noise_of(runs: Sequence[RecordedRun], costs: Costs) -> Mapping[str, float]:
    """Return the spread of a part's time around its fitted cost, as a share, over the steps of runs in which it is alone.

    What is predicted of a step cannot be better than that; the mean of many steps can.
    """
    shares = []
    for step in (step for run in runs if run.loop == "sync" for step in run.warm):
        fitted = costs.trainer.step_s(step.tokens(shared=costs.trainer.shares_prompts), gpus=1)
        shares.append(step.metrics["perf/train_time"] / fitted)
    return {"trainer": stdev(shares) / mean(shares)} if len(shares) > 1 else {}
