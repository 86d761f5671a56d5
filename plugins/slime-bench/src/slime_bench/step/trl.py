"""TRL's GRPOTrainer on the work of `slime bench step`."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from slime_core.errors import PluginError
from slime_torch.engine import engine_dtype

from slime_bench.step.work import parity_of


def trl_step(model_path: Path, prompts: list[str], *, n_prompts: int, n_samples: int, n_tokens: int) -> float:
    """Return the median seconds of one GRPO step of TRL, after one warm-up step, in the dtype that the engine `torch` takes here.

    Args:
        model_path: Hugging Face folder.
        prompts: one step's prompts after the other's; the first step is the warm-up.
        n_prompts: prompts of a step.
        n_samples: samples of a prompt.
        n_tokens: new tokens of a sample, exactly.
    """
    try:
        import torch
        from datasets import Dataset
        from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
        from trl import GRPOConfig, GRPOTrainer
    except ImportError as error:
        raise PluginError(f"slime bench step --peer trl: {error}; install slime-bench[peers]") from error

    class Clock(TrainerCallback):
        """Notes when each step ends."""

        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.ends.append(time.perf_counter())

    clock = Clock()
    on_gpu, dtype = torch.cuda.is_available(), engine_dtype("auto")
    with tempfile.TemporaryDirectory(prefix="trl-") as folder:
        config = GRPOConfig(
            output_dir=folder,
            per_device_train_batch_size=n_samples * n_prompts,
            num_generations=n_samples,
            max_completion_length=n_tokens,
            generation_kwargs={"min_new_tokens": n_tokens},
            max_steps=len(prompts) // n_prompts,
            learning_rate=1e-6,
            beta=0.0,
            bf16=dtype is torch.bfloat16,
            use_cpu=not on_gpu,
            gradient_checkpointing=False,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(model_path, dtype=dtype),
            reward_funcs=lambda completions, **_: [parity_of(text) for text in completions],
            args=config,
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=AutoTokenizer.from_pretrained(model_path),
            callbacks=[clock],
        )
        trainer.train()
    return statistics.median(b - a for a, b in zip(clock.ends, clock.ends[1:], strict=False))
