"""Tokenizers, processors, and images of requests."""

from slime_compat.views.processing import encode_image_for_rollout_engine, load_processor, load_tokenizer

__all__ = ["encode_image_for_rollout_engine", "load_processor", "load_tokenizer"]
