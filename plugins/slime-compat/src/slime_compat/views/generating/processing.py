"""Tokenizers and processors by name, and images of requests."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from typing import Any

from slime_core.errors import DataError

from slime_compat.engine.tokenizer import foreign_tokenizer
from slime_compat.views.running.runtime import running


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
        processor: Any = AutoProcessor.from_pretrained(folder, local_files_only=True)  # type: ignore[no-untyped-call]  # transformers
    except (OSError, ValueError):
        return None
    return None if isinstance(processor, PreTrainedTokenizerBase) else processor


def encode_image_for_rollout_engine(image: Any) -> str:
    """Return an image (of Pillow) as a `data:` URL."""
    buffer = io.BytesIO()
    (image.convert("RGB") if image.mode != "RGB" else image).save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def build_processor_kwargs(multimodal_inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the arguments of a transformers processor for images, videos and audio; kinds of which there are none are left out."""
    return {name: given for name, given in (multimodal_inputs or {}).items() if given}


def process_vision_info(prompt: Sequence[Mapping[str, Any]], processor: Any = None) -> dict[str, Any]:
    """Return the images of chat messages, opened, as `images`; videos are not read.

    Raises:
        DataError: an image cannot be read.
    """
    contents = [message["content"] for message in prompt if isinstance(message.get("content"), list)]
    parts = [part for content in contents for part in content if part.get("type") == "image"]
    images = [_opened(part["image"] if "image" in part else part["url"]) for part in parts]
    return {"images": images or None, "videos": None}


def _opened(image: Any) -> Any:
    from PIL import Image

    if isinstance(image, Image.Image):
        return image
    text = str(image)
    try:
        is_inline = text.startswith("data:")
        source: Any = (
            io.BytesIO(base64.b64decode(text.partition(",")[2]))
            if is_inline
            else text.removeprefix("file://")
        )
        with Image.open(source) as opened:
            return opened.copy()
    except (OSError, ValueError) as error:
        raise DataError(
            f"image {text[:60]}: {type(error).__name__}: {error}; wanted a file or a data: URL"
        ) from error
