"""A random model that sees images, small enough for a CPU, with tokenizer, processor and chat template."""

from __future__ import annotations

import base64
import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from slime_models.hf.processor import read_image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLImageProcessor,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
)

VOCAB = 128
#: Ids 123 to 127.
SPECIAL = ("<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
EOS, START, END, PLACEHOLDER, VIDEO = range(VOCAB - len(SPECIAL), VOCAB)
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'image' %}"
    + IMAGE
    + "{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
#: Side of a patch in pixels, and of a square of patches that make one id.
PATCH, MERGE = 4, 2


class TinyVision:
    """The model and its folder.

    Args:
        folder: written to.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        torch.manual_seed(0)
        self.model = Qwen3VLForConditionalGeneration(_config()).eval()
        with torch.no_grad():
            self.model.lm_head.weight[START:] = 0  # greedy responses hold no image
        self.model.save_pretrained(folder)
        vocabulary = {f"t{i}": i for i in range(EOS)} | {word: EOS + i for i, word in enumerate(SPECIAL)}
        words = Tokenizer(WordLevel(vocabulary, unk_token="t0"))
        words.pre_tokenizer = WhitespaceSplit()
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=words, eos_token=SPECIAL[0], extra_special_tokens=list(SPECIAL[1:])
        )
        tokenizer.chat_template = TEMPLATE
        patches = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2}
        self.processor = Qwen3VLProcessor(
            image_processor=Qwen2VLImageProcessor(
                **patches, size={"shortest_edge": 64, "longest_edge": 4096}
            ),
            tokenizer=tokenizer,
            video_processor=Qwen3VLVideoProcessor(**patches),
            chat_template=TEMPLATE,
        )
        self.processor.save_pretrained(folder)

    @torch.no_grad()
    def log_probs_of(
        self, text: str, images: list[str], tokens: list[int], *, can_end: bool = True
    ) -> tuple[list[float], list[int], list[int]]:
        """Return by one pass of transformers the log-probs of tokens after a prompt, the likeliest ones, and the prompt's ids."""
        inputs = self.processor(
            text=[text], images=[read_image(image) for image in images] or None, return_tensors="pt"
        )
        prompt = inputs.pop("input_ids")
        ids = torch.cat([prompt, torch.tensor([tokens])], dim=1)
        inputs["mm_token_type_ids"] = (ids == PLACEHOLDER).int()
        inputs["attention_mask"] = torch.ones_like(ids)
        logits = self.model(input_ids=ids, **inputs).logits[0, prompt.shape[1] - 1 : -1]
        if not can_end:
            logits[:, EOS] = -torch.inf
        log_probs = logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
        return log_probs.tolist(), logits.argmax(-1).tolist(), prompt[0].tolist()


def _config() -> Qwen3VLConfig:
    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [2, 3, 3],
        "mrope_interleaved": True,
    }
    return Qwen3VLConfig(
        text_config={
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 16384,
            "initializer_range": 0.1,
            "rope_parameters": rope,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": EOS,
            "dtype": "float32",
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "out_hidden_size": 64,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0],
            "initializer_range": 0.1,
        },
        image_token_id=PLACEHOLDER,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        tie_word_embeddings=False,
        dtype="float32",
    )


def picture(seed: int, *, width: int, height: int) -> bytes:
    """Return a PNG of random pixels. Its sides should be multiples of 8: it is not resized then."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def as_url(png: bytes) -> str:
    """Return it as a `data:` URL."""
    return "data:image/png;base64," + base64.b64encode(png).decode()
