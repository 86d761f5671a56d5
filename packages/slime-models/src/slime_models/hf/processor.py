"""`ImageProcessor`: the token ids of a prompt with images, by the processor of a Hugging Face folder."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slime_core.errors import DataError

#: One of these says how a model takes images.
_FILES = ("processor_config.json", "preprocessor_config.json")


class ImageProcessor:
    """The processor of a Hugging Face folder.

    Args:
        model_path: Hugging Face folder.

    Raises:
        DataError: the folder has none, or transformers cannot read it or names no placeholder.
    """

    def __init__(self, model_path: Path) -> None:
        if not any((model_path / file).is_file() for file in _FILES):
            raise DataError(
                f"{model_path}: found neither of {' and '.join(_FILES)}; wanted a model that sees images, with its processor"
            )
        from transformers import AutoProcessor

        try:
            self._inner: Any = AutoProcessor.from_pretrained(  # type: ignore[no-untyped-call]  # transformers leaves it so
                model_path, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # what is raised depends on the file, and on the library that reads it
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DataError(f"{model_path}: transformers cannot read the processor: {reason}") from error
        self._placeholder: str | None = getattr(self._inner, "image_token", None)
        if self._placeholder is None:
            raise DataError(
                f"{model_path}: {type(self._inner).__name__} names no image_token; wanted a processor of images and text"
            )

    def encode(self, text: str, images: Sequence[str]) -> list[int]:
        """Return the ids of a rendered prompt; adds no special tokens by itself.

        Raises:
            DataError: an image cannot be read, or there is not one placeholder for each.
        """
        assert self._placeholder is not None
        if (found := text.count(self._placeholder)) != len(images):
            raise DataError(
                f"found {found} times {self._placeholder} in the rendered prompt and {len(images)} images; wanted one for "
                "each: the chat template writes it where a message has an image, and text must not hold it"
            )
        pictures = [read_image(image) for image in images]
        inputs = self._inner(text=[text], images=pictures, add_special_tokens=False)
        return [int(token) for token in inputs["input_ids"][0]]


def read_image(image: str) -> Any:
    """Return a PIL image in RGB from the path of a file or a `data:` URL.

    Raises:
        DataError: there is none, or it cannot be read.
    """
    from PIL import Image, UnidentifiedImageError

    shown = image if len(image) < 200 else image[:60] + "..."
    try:
        with Image.open(io.BytesIO(image_bytes(image))) as opened:
            return opened.convert("RGB")
    except (OSError, UnidentifiedImageError, Image.DecompressionBombError, SyntaxError) as error:
        raise DataError(
            f"{shown}: found no image that can be read ({type(error).__name__}); wanted PNG, JPEG or the like"
        ) from error


def image_bytes(image: str) -> bytes:
    """Return what the file of an image holds.

    Raises:
        DataError: there is no such file, or what follows `data:` is not base64.
    """
    if image.startswith("data:"):
        head, _, body = image.partition(",")
        try:
            return base64.b64decode(body, validate=True)
        except binascii.Error as error:
            raise DataError(
                f"{head[:60]}: found bytes that are not base64 ({error}); wanted an image"
            ) from error
    try:
        return Path(image).read_bytes()
    except OSError as error:
        raise DataError(f"{image[:200]}: {error.strerror}; wanted the file of an image") from error
