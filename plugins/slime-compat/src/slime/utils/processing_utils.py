"""Tokenizers, processors, and images of requests."""

from slime_compat.views.generating.processing import (
    build_processor_kwargs,
    encode_image_for_rollout_engine,
    load_processor,
    load_tokenizer,
    process_vision_info,
)

__all__ = [
    "build_processor_kwargs",
    "encode_image_for_rollout_engine",
    "load_processor",
    "load_tokenizer",
    "process_vision_info",
]
