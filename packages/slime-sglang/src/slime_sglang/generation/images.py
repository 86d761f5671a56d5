"""Images of a prompt, as SGLang takes them: their bytes, and one placeholder id for each among the prompt's ids."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from slime_core.errors import EngineError
from slime_models.hf.processor import image_bytes

from slime_sglang.http.client import ServerFaultError

#: Key of a model's config.json: the id of the placeholder, which is repeated to the length of its image.
PLACEHOLDER = "image_token_id"


def data_urls(images: Sequence[str]) -> list[str]:
    """Return images as `data:` URLs, which servers on any host can read.

    Raises:
        DataError: a file cannot be read.
    """
    return [
        image
        if image.startswith("data:")
        else "data:image;base64," + base64.b64encode(image_bytes(image)).decode()
        for image in images
    ]


def fold_placeholders(tokens: Sequence[int], placeholder: int | None, *, n_images: int) -> list[int]:
    """Return ids in which each run of placeholders is one placeholder, which the server expands to its image again.

    Args:
        tokens: ids of the prompt, each image's placeholder repeated to its length.
        placeholder: id of the placeholder; None where the model has none.
        n_images: how many runs there must be.

    Raises:
        EngineError: the model takes no images, or there is not one run for each.
    """
    if placeholder is None:
        raise EngineError(
            f"the prompt has {n_images} images, and the model's config.json has no {PLACEHOLDER}; wanted a model that sees them"
        )
    runs = [(token, 1 if token == placeholder else len(list(run))) for token, run in groupby(tokens)]
    if (found := sum(token == placeholder for token, _ in runs)) != n_images:
        raise EngineError(
            f"found {found} runs of the image placeholder {placeholder} among the ids and {n_images} images; wanted one "
            "for each, also where a response goes on that holds a placeholder itself"
        )
    return [token for token, length in runs for _ in range(length)]


def check_prompt_ids(answer: Mapping[str, Any], sent: Sequence[int]) -> None:
    """Check that the server made the sample's ids out of prompt and images.

    Raises:
        EngineError: it read others, which it would have done at any other engine, too.
        ServerFaultError: the answer does not say.
    """
    read = answer.get("prompt_token_ids")
    if read is None:
        raise ServerFaultError("/generate: the ids of the prompt were asked for, and the answer has none")
    if list(read) != list(sent):
        raise EngineError(
            f"/generate: the server read prompt and images as {len(read)} ids, which are not the sample's {len(sent)}; "
            "it dropped images, or takes them otherwise than the processor of --hf-checkpoint (--sglang-mm-process-config?); "
            "its log may say more"
        )
