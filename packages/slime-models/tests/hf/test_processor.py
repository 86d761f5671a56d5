"""Prompts with images: how long they are, and what is no image."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import pytest
from PIL import Image
from slime_core.errors import DataError
from slime_models.hf.tokenizer import HfTokenizer, load_tokenizer
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
WORDS = ["?", "left", "right", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
LEFT, RIGHT, START, END, PAD = range(1, 6)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HfTokenizer:
    """Of a model whose patches are 4 x 4 pixels, four of them an id."""
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="?"))
    words.pre_tokenizer = WhitespaceSplit()
    patches = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    folder = tmp_path_factory.mktemp("seeing")
    Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(**patches, size={"shortest_edge": 64, "longest_edge": 4096}),
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=words, extra_special_tokens=WORDS[3:]),
        video_processor=Qwen2VLVideoProcessor(**patches),
    ).save_pretrained(folder)
    return load_tokenizer(folder)


def png(width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGBA", (width, height)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def file(tmp_path: Path) -> str:
    """An image of 3 x 4 ids."""
    path = tmp_path / "a.png"
    path.write_bytes(png(24, 32))
    return str(path)


def test_a_prompt_is_as_long_as_its_images(tokenizer: HfTokenizer, file: str) -> None:
    url = "data:image/png;base64," + base64.b64encode(png(40, 16)).decode()  # 5 x 2 ids
    tokens = tokenizer.encode_with_images(f"left {IMAGE}{IMAGE} right", [file, url])
    assert tokens == [LEFT, START, *[PAD] * 12, END, START, *[PAD] * 10, END, RIGHT]


@pytest.mark.parametrize("count", [0, 2])
def test_there_is_one_placeholder_for_each_image(tokenizer: HfTokenizer, file: str, count: int) -> None:
    with pytest.raises(DataError, match=rf"found {count} times <\|image_pad\|> .* and 1 images; wanted one"):
        tokenizer.encode_with_images(f"left {IMAGE * count}", [file])


def test_what_cannot_be_read_is_named(tokenizer: HfTokenizer, tmp_path: Path) -> None:
    text = tmp_path / "text.png"
    text.write_text("no image")
    for image, words in (
        (str(tmp_path / "none.png"), r"none.png: No such file or directory; wanted the file of an image"),
        (str(text), r"text.png: found no image that can be read \(UnidentifiedImageError\)"),
        ("data:image/png;base64,AAAA", r"data:image/png;base64,AAAA: found no image that can be read"),
        ("data:image/png;base64,*", r"data:image/png;base64: found bytes that are not base64"),
    ):
        with pytest.raises(DataError, match=words):
            tokenizer.encode_with_images(IMAGE, [image])


def test_half_an_image_is_named(tokenizer: HfTokenizer, file: str) -> None:
    Path(file).write_bytes(png(24, 32)[:60])
    with pytest.raises(DataError, match=r"a.png: found no image that can be read \(.*\)"):
        tokenizer.encode_with_images(IMAGE, [file])


def test_a_model_of_text_sees_no_images(smollm2: Path, file: str) -> None:
    with pytest.raises(DataError, match="wanted a model that sees images, with its processor"):
        load_tokenizer(smollm2).encode_with_images(IMAGE, [file])
