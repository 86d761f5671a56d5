"""Functions of a user that see samples, groups and the buffer, with the reference system's signatures."""

import json
from pathlib import Path

from slime.rollout.filter_hub.base_types import DynamicFilterOutput
from slime.utils.types import Sample


def dapo_filter(args, samples: list[Sample], **kwargs):
    """Drop groups whose rewards are all equal."""
    rewards = [sample.get_reward_value(args) for sample in samples]
    keep = max(rewards) - min(rewards) > 0
    return DynamicFilterOutput(keep=keep, reason=None if keep else f"zero_std_{rewards[0]}")


def bool_filter(args, samples, **kwargs):
    """Keep groups in which something is right."""
    return any(sample.get_reward_value(args) > 0 for sample in samples)


def number_filter(args, samples, **kwargs):
    """Return what is neither."""
    return 1.5


def newest_first(args, rollout_id, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
    """Take what came last."""
    assert rollout_id is None
    taken = [buffer.pop() for _ in range(min(num_samples, len(buffer)))]
    for group in taken:
        for sample in group:
            sample.metadata["from_buffer"] = True
    return taken


async def sample_hook(args, sample, *, rollout_id=None, evaluation=False):
    """Note who was seen."""
    sample.metadata["seen"] = [rollout_id, evaluation, isinstance(sample, Sample)]
    return sample


def sample_filter(args, data: list[list[Sample]]) -> None:
    """Leave every other sample out."""
    for group in data:
        for sample in group[::2]:
            sample.remove_sample = True


def all_samples(args, all_samples, data_source) -> None:
    """Count groups, dropped ones too."""
    path = Path(args.output_dir) / "seen.txt"
    path.write_text((path.read_text() if path.exists() else "") + f"{len(all_samples)}\n")


def post_process(args, samples: list[Sample]):
    """Centre rewards in the whole batch."""
    raw = [sample.get_reward_value(args) for sample in samples]
    mean = sum(raw) / len(raw)
    return raw, [one - mean for one in raw]


async def reward_without_a_number(args, sample: Sample, **kwargs):
    """Return what the post-processing alone can read."""
    return {"log_probs": [None, -0.5, -0.25], "of": sample.index}


async def reward_that_is_no_json(args, sample: Sample, **kwargs):
    """Return what no checkpoint can hold."""
    return {"answer": object()}


def post_process_answers(args, samples: list[Sample]):
    """Read what the reward returned."""
    answers = [sample.get_reward_value(args) for sample in samples]
    return [0.0 for _ in answers], [sum(answer["log_probs"][1:]) + answer["of"] for answer in answers]


def convert(args, samples: list[Sample]):
    """Train on all but the last token of each response."""
    return {
        "tokens": [sample.tokens for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": [1.0 for _ in samples],
        "raw_reward": [sample.get_reward_value(args) for sample in samples],
        "truncated": [int(sample.status == Sample.Status.TRUNCATED) for sample in samples],
        "sample_indices": [sample.index for sample in samples],
        "loss_masks": [[1] * (sample.response_length - 1) + [0] for sample in samples],
        "rollout_log_probs": [sample.rollout_log_probs for sample in samples],
    }


def rollout_log(rollout_id, args, samples, rollout_extra_metrics, rollout_time) -> bool:
    """Log a step in a file of its own."""
    line = {"rollout_id": rollout_id, "samples": len(samples), "first": type(samples[0]).__module__}
    with open(f"{args.output_dir}/log.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
    return True


def eval_log(rollout_id, args, data, extra_metrics) -> bool:
    """Log an evaluation in a file of its own."""
    with open(f"{args.output_dir}/eval.jsonl", "a") as file:
        file.write(json.dumps({name: sum(one["rewards"]) for name, one in data.items()}) + "\n")
    return False


async def group_reward(args, samples, **kwargs):
    """Rank the responses of a group by their length."""
    lengths = sorted(sample.response_length for sample in samples)
    return [float(lengths.index(sample.response_length)) for sample in samples]
