"""A user's rewards, with the reference system's signature: some keep `args` to themselves, and some do not."""


def keeps_it(args, sample):
    """Read a setting, and have a function of this file read another."""
    return float(len(sample.response) < args.rollout_max_response_len) + shaped(args)


def shaped(args):
    """Read a setting by its name as text."""
    return getattr(args, "gamma", 1.0)


def of_samples(args, samples):
    """Read rewards, and what follows from a setting of another name."""
    rewards = [sample.get_reward_value(args) for sample in samples]
    return rewards, rewards if args.grpo_std_normalization else [0.0] * len(rewards)
