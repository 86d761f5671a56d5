"""`slime bench trainer`: training tokens a second, ours beside transformers' forward and backward in one run."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from slime_core.assemble import Algorithm, resolve_model
from slime_core.batch import TrainBatch
from slime_core.config.sections import TrainSection
from slime_core.plugins.registry import Registry
from slime_core.schedule import pack_micro_batches

from slime_megatron.section import MegatronSection
from slime_megatron.settings import LearnerSettings

if TYPE_CHECKING:
    from slime_megatron.learner import Learner


def trainer(argv: list[str]) -> int:
    """Measure a whole optimizer step of ours, and transformers' forward and backward over the same samples.

    Both compute in bfloat16. Ours includes the optimizer; transformers' does not, and its micro-batches hold the
    samples of ours, padded to the longest of them.
    """
    options = _parse(argv)
    registry = Registry.from_environment()
    folder = resolve_model(options.model, registry)
    learner = _learner(folder, registry, options.max_tokens)
    batch = _batch(options, vocab_size=learner.model.vocab_size)
    peer = _transformers(folder, batch, options.max_tokens)
    seconds: dict[str, list[float]] = {"slime": [], "transformers": []}
    for repeat in range(
        options.repeats + 1
    ):  # the first of each warms up; then in turn, so that both meet one machine
        for name, run in (("slime", lambda: learner.train(batch)), ("transformers", peer)):
            start = time.perf_counter()
            run()
            if repeat:
                seconds[name].append(time.perf_counter() - start)
    learner.close()
    tokens = len(batch.tokens)
    print(f"{options.model}, {options.samples} samples, {tokens} tokens, median of {options.repeats}:")
    rates = {name: tokens / statistics.median(times) for name, times in seconds.items()}
    for name, what in (("slime", "log-probs, gradients, AdamW"), ("transformers", "forward, backward")):
        print(f"  {name:13} {rates[name]:8.0f} tokens/s  ({what})")
    print(f"  ratio         {rates['slime'] / rates['transformers']:8.2f}")
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="slime bench trainer", description=trainer.__doc__)
    parser.add_argument(
        "--model", default="smollm2-135m", help="Hugging Face folder, hub name, or short name"
    )
    parser.add_argument("--samples", type=int, default=64, help="samples of the step")
    parser.add_argument("--prompt", type=int, default=50, help="tokens of each prompt")
    parser.add_argument("--response", type=int, default=40, help="mean tokens of a response")
    parser.add_argument("--max-tokens", type=int, default=4096, help="tokens of a micro-batch")
    parser.add_argument("--repeats", type=int, default=5, help="measured steps")
    return parser.parse_args(argv)


def _learner(folder: Path, registry: Registry, max_tokens: int) -> Learner:
    from slime_megatron import compat

    compat.install()
    from slime_models.checkpoint import read_config

    from slime_megatron.learner import Learner

    return Learner(
        LearnerSettings(
            model_path=folder,
            family=registry.resolve("slime.models", read_config(folder)["model_type"]),
            train=TrainSection(max_tokens_per_gpu=max_tokens),
            megatron=MegatronSection(),
            algorithm=Algorithm(_estimator, _loss, frozenset(), "raw"),
            seed=0,
        )
    )


def _estimator(view: Any) -> tuple[Any, Any]:
    advantages = view.rewards[view.sample_of_token]
    return advantages, advantages


def _loss(view: Any, advantages: Any) -> tuple[Any, dict[str, Any]]:
    return view.reduce(-(view.log_probs - view.old_log_probs).exp() * advantages), {}


def _batch(options: argparse.Namespace, *, vocab_size: int) -> TrainBatch:
    """Return random samples; responses are between half and one and a half of `--response` long."""
    draw = np.random.default_rng(0)
    n = options.samples
    responses = draw.integers(max(1, options.response // 2), options.response * 3 // 2 + 1, n)
    offsets = np.concatenate([[0], np.cumsum(responses + options.prompt)])
    response_offsets = np.concatenate([[0], np.cumsum(responses)])
    return TrainBatch(
        step=0,
        tokens=draw.integers(0, vocab_size, offsets[-1]).astype(np.int32),
        offsets=offsets,
        response_offsets=response_offsets,
        loss_mask=np.ones(response_offsets[-1], dtype=np.float32),
        rollout_log_probs=None,
        teacher_log_probs=None,
        rewards=draw.standard_normal(n).astype(np.float32),
        raw_rewards=np.zeros(n, dtype=np.float32),
        sample_ids=np.arange(n),
        group_ids=np.arange(n),
        rollout_ids=np.arange(n),
        truncated=np.zeros(n, dtype=np.bool_),
        optimizer_steps=(np.arange(n),),
        weights=np.repeat(1 / responses / n, responses).astype(np.float32),
        temperature=1.0,
    )


def _transformers(folder: Path, batch: TrainBatch, max_tokens: int) -> Callable[[], None]:
    """Return transformers' forward and backward over the batch, prompt tokens left out of its loss."""
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).train()
    padded = []
    for samples in pack_micro_batches(batch.lengths.tolist(), max_tokens):
        rows = [
            torch.from_numpy(batch.tokens[batch.offsets[i] : batch.offsets[i + 1]].astype(np.int64))
            for i in samples
        ]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        labels = torch.full_like(tokens, -100)
        for row, i in enumerate(samples):
            labels[row, batch.lengths[i] - batch.response_lengths[i] : batch.lengths[i]] = rows[row][
                -int(batch.response_lengths[i]) :
            ]
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
        padded.append([tensor.to(device) for tensor in (tokens, mask, labels)])

    def run() -> None:
        model.zero_grad()
        for tokens, mask, labels in padded:
            model(input_ids=tokens, attention_mask=mask, labels=labels).loss.backward()
        if device == "cuda":
            torch.cuda.synchronize()

    return run
