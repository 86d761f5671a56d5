"""Contract kit of what a model family brings to the trainer. Tables of weights have theirs in `slime_models.testing`."""

from slime_megatron.testing.families import check_trained_family, random_model

__all__ = ["check_trained_family", "random_model"]
