"""Images in prompts: how data and samples hold them, and what a tokenizer and an engine that take them add to their protocols.

An image is a str: the path of a file, or a `data:` URL with its bytes. `Sample.multimodal_inputs["image"]` lists those of
a prompt in the order of their placeholders. `Sample.tokens` are the ids that the model sees, each placeholder as long as
its image.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from slime_core.errors import DataError, SampleError
from slime_core.protocols import Completion, GenerateContext, SamplingParams
from slime_core.sample import Sample

#: The kind of media that engines take.
IMAGE = "image"


@runtime_checkable
class EncodesImages(Protocol):
    """A `Tokenizer` of a model that may see images."""

    def encode_with_images(self, text: str, images: Sequence[str]) -> list[int]:
        """Return the ids of a rendered prompt as the model sees them: each placeholder as long as its image.

        Raises:
            DataError: an image cannot be read, there is not one placeholder for each, or the model sees none.
        """


@runtime_checkable
class SeesImages(Protocol):
    """A `RolloutEngine` that takes images. It says so, and so does its factory: `sees_images = True` as attribute."""

    sees_images: bool

    async def generate(
        self,
        tokens: Sequence[int],
        params: SamplingParams,
        *,
        session_id: str | None = None,
        images: Sequence[str] = (),
    ) -> Completion:
        """Generate one response to ids among which each run of placeholders stands for the next of `images`."""


async def generate(ctx: GenerateContext, sample: Sample, params: SamplingParams) -> Completion:
    """Have the engine go on with a sample, which sees its images.

    Raises:
        SampleError: it carries media that the engine does not take.
    """
    media = sample.multimodal_inputs
    if not media:
        return await ctx.engine.generate(sample.tokens, params, session_id=sample.session_id)
    engine = ctx.engine
    if set(media) != {IMAGE} or not isinstance(engine, SeesImages):
        takes = f"{IMAGE} only" if isinstance(engine, SeesImages) else "ids only"
        raise SampleError(
            f"{sample.name}: carries {sorted(media)}, and the engine takes {takes}; choose an engine that takes "
            "images (sglang), or a generator that sends such media"
        )
    return await engine.generate(sample.tokens, params, session_id=sample.session_id, images=media[IMAGE])


def image_of(value: Any, *, where: str, root: Path) -> str:
    """Return an image of a data file as a str, as samples hold it.

    Data is often somebody else's, and is not to choose which of the user's files a model is shown.

    Args:
        value: path, from `root` if it is relative; `data:` URL; bytes of a file; or a table with one of them under
            `bytes` or `path`, as Hugging Face data sets have it.
        where: the row, for the error.
        root: folder that paths must stay in.

    Raises:
        DataError: a path leads out of `root`, or it is something else; an address in the network among them.
    """
    if isinstance(value, Mapping) and (value.get("bytes") or value.get("path")):
        value = value.get("bytes") or value["path"]
    if isinstance(value, bytes):
        return "data:image;base64," + base64.b64encode(value).decode()
    if isinstance(value, str) and value.startswith("data:"):
        return value
    if isinstance(value, str) and value and "://" not in value and "\0" not in value:
        top = os.path.normpath(root.absolute())
        path = os.path.normpath(os.path.join(top, value))  # Path keeps `..`
        if os.path.commonpath([top, path]) != top:
            raise DataError(
                f"{where}: found the image {value[:200]!r}, which is not in {top}; wanted a file there; move it, or name "
                "the folder that images may be read from (--media-root)"
            )
        return path
    raise DataError(
        f"{where}: found {str(value)[:60]!r} for an image; wanted the path of a file, a data: URL, or bytes"
    )
