"""What cannot be called as the reference system calls it, or asks for what there is not."""


async def generate(args, sample):
    """Take one argument too few."""
    return sample


async def generate_nothing(args, sample, sampling_params):
    """Return no sample."""
    return "done"


async def unmasked(args, sample, sampling_params):
    """Forget to mask what it appends."""
    sample.tokens, sample.response_length, sample.loss_mask = [0, 1, 2], 2, [1]
    sample.status = sample.Status.COMPLETED
    return sample


def dapo_filter(args):
    """Take one argument too few."""
    return True


def reads_nowhere(args, samples, **kwargs):
    """Read a setting that nobody has."""
    return len(samples) > _limit(args)


def _limit(args):
    if hasattr(args, "optional_limit"):
        return args.optional_limit
    return args.my_own_limit


def reads_known(args, samples, **kwargs):
    """Read settings that there are, and one that may be."""
    return args.rollout_batch_size > 0 and args.lr > 0 and getattr(args, "my_own_limit", 1) > 0


def reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    """Return a number."""
    return 3.0


def advantages(args, rollout_data):
    """Set nothing."""
