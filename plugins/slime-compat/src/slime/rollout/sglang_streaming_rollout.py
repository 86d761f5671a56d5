"""Generation that an abort ends: here every engine keeps what it has of a response."""

from slime_compat.views.generating.rollout import generate as generate_streaming

__all__ = ["generate_streaming"]
