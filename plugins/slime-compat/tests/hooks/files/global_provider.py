"""A model provider that asks Megatron for its global arguments."""


def provider(pre_process=True, post_process=True, vp_stage=None):
    """Build a model of them."""
    from megatron.training import get_args

    return get_args().num_layers
