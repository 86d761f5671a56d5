"""What a learner on any device has, on the host, how far it may be from other numbers, and batches of shared prompts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from slime_models.family.families.qwen3 import QWEN3
from slime_models.hf.config import read_config

from .batches import make_batch


def near(on_cpu):
    """Return how far apart float32 numbers may be on the trainer's device that may be so far apart on a CPU.

    Eight times as far on CUDA, where up to 4.6 times were seen. What is compared was computed by kernels that add products up in other orders, there for other shapes,
    too, and against transformers on the CPU exponentials and roots are rounded otherwise; so errors are independent that on a CPU,
    where both call the same kernels, are alike for the most part.
    """
    return 8 * on_cpu if torch.cuda.is_available() else on_cpu


def sent(learner, dtype="float32"):
    """Return copies of the weights that engines would get, by name."""
    return {name: tensor.to("cpu", copy=True) for bucket in learner.weights(dtype) for name, tensor in bucket}


def gradients_of(learner, folder, family=QWEN3):
    """Return the gradients of the last optimizer step under their Hugging Face names."""
    architecture = family.architecture(read_config(folder))
    return {
        name: gradient.cpu().clone()
        for megatron_name, parameter in learner.model.named_parameters()
        for name, gradient in family.to_hf(megatron_name, parameter.main_grad, architecture)
    }


def relative(found, wanted):
    """Return the largest difference of any tensor, relative to the largest entry of that tensor."""
    assert found.keys() == wanted.keys()
    return max(((found[n] - wanted[n]).abs().max() / wanted[n].abs().max()).item() for n in wanted)


def shared_prompts():
    """Return a batch of two groups whose samples have one prompt each, and one whose prompts differ."""
    lengths = ((5, 9), (5, 3), (5, 1), (7, 12), (7, 14), (5, 11), (5, 2))
    batch = make_batch(lengths=lengths)
    groups, tokens = np.array([0, 0, 0, 1, 1, 2, 2]), batch.tokens.copy()
    for i, first in ((1, 0), (2, 0), (4, 3)):
        n = lengths[i][0]
        tokens[batch.offsets[i] : batch.offsets[i] + n] = tokens[
            batch.offsets[first] : batch.offsets[first] + n
        ]
    return replace(batch, tokens=tokens, group_ids=groups)


def conversations():
    """Return a group of a conversation's turns and forks, one of samples that share a prompt, and a sample alone.

    Positions 0 to 4 share the ids of one conversation of 70: its first turn; its second, whose history is response, too; a fork
    after 40 tokens; one of the second turn after 58; one after 20, with a prompt of its own.
    """
    prefixes = ((32, 32), (70, 70), (40, 55), (58, 64), (20, 35))  # (tokens of the conversation, all tokens)
    prompts = (10, 10, 38, 45, 25)
    lengths = [(prompt, total - prompt) for prompt, (_, total) in zip(prompts, prefixes, strict=True)]
    batch = make_batch(lengths=(*lengths, (6, 9), (6, 4), (5, 3)))
    tokens = batch.tokens.copy()
    whole = tokens[batch.offsets[1] : batch.offsets[2]]
    for i, (n, _) in enumerate(prefixes):
        tokens[batch.offsets[i] : batch.offsets[i] + n] = whole[:n]
    tokens[batch.offsets[6] : batch.offsets[6] + 6] = tokens[batch.offsets[5] : batch.offsets[5] + 6]
    return replace(batch, tokens=tokens, group_ids=np.array([0, 0, 0, 0, 0, 1, 1, 2]))
