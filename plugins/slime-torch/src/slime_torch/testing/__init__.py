"""Contract kit of what a model family brings to the engine `torch`."""

from slime_torch.testing.families import check_served_family

__all__ = ["check_served_family"]
