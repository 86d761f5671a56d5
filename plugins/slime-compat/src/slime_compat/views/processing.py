"""Tokenizers and processors by name, and images of requests."""

from __future__ import annotations

import base64
import io
from typing import Any

from slime_compat.engine.tokenizer import foreign_tokenizer
from slime_compat.views.runtime import running


def load_tokenizer(name_or_path: str, chat_template_path: str | None = None, **kwargs: Any) -> Any:
    """Return the transformers tokenizer of a folder; of the run's own model what the run has."""
    runtime = running()
    if runtime is not None and name_or_path == runtime.args.hf_checkpoint and chat_template_path is None:
        return foreign_tokenizer(runtime.context.tokenizer)
    from slime_core.plugins.registry import Registry
    from slime_core.run.build import resolve_model
    from slime_models.hf.tokenizer import load_tokenizer as load

    tokenizer = load(resolve_model(name_or_path, Registry.from_environment())).inner
    if chat_template_path is not None:
        with open(chat_template_path) as file:
            tokenizer.chat_template = file.read()
    return tokenizer


def load_processor(name_or_path: str, **kwargs: Any) -> Any:
    """Return the transformers processor of a folder, None where its model reads text alone."""
    from slime_core.plugins.registry import Registry
    from slime_core.run.build import resolve_model
    from transformers import AutoProcessor, PreTrainedTokenizerBase

    folder = resolve_model(name_or_path, Registry.from_environment())
    try:
        processor = AutoProcessor.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError):
        return None
    return None if isinstance(processor, PreTrainedTokenizerBase) else processor


def encode_image_for_rollout_engine(image: Any) -> str:
    """Return an image (of Pillow) as a `data:` URL."""
    buffer = io.BytesIO()
    (image.convert("RGB") if image.mode != "RGB" else image).save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
