"""Functions of a user's own for whole evaluations, conversions and corrections, in slime's own signatures."""

from __future__ import annotations

from slime_core.protocols.correction import Correction
from slime_core.rollout.group import run_group
from slime_core.run.evaluation import eval_params


async def evaluate_halves(run, step, source, *, first: int = 5):
    """Evaluate the first prompts and the others as two sets."""
    groups = source.take(len(source))
    done = [
        await run_group(run, group, params_of=lambda sample: eval_params(run, sample), evaluation=True)
        for group in groups
    ]
    return {"first": done[:first], "rest": done[first:]}, {"eval/own": float(step)}


async def evaluate_nothing(run, step, source):
    """Return no set."""
    return {}


def first_tokens(args, samples):
    """Train on the first token of each response alone, twice as much on even samples."""
    assert args.rollout.rollout_batch_size == 4
    return {
        "tokens": [one.tokens[: one.prompt_length + 1] for one in samples],
        "response_lengths": [1 for _ in samples],
        "sample_indices": [one.index for one in samples],
        "rollout_log_probs": [one.rollout_log_probs[:1] for one in samples],
        "rewards": [2.0 if one.index % 2 == 0 else 1.0 for one in samples],
    }


def too_short(args, samples):
    """Return masks that do not fit."""
    return first_tokens(args, samples) | {"loss_masks": [[1, 1] for _ in samples]}


def unknown_column(args, samples):
    """Return a column that nobody reads."""
    return first_tokens(args, samples) | {"colour": ["red" for _ in samples]}


def halved(view):
    """Let each token count half."""
    return Correction(importance=view.loss_mask / 2), {"half": 0.5}
