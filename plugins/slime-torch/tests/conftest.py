"""Tiny random models of each family, written by transformers, and engines on them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from slime_core.plugins.registry import Registry
from slime_core.protocols import Completion, SamplingParams
from slime_models.family.families.glm import GLM
from slime_models.family.families.glm4 import GLM4
from slime_models.family.families.glm4_moe import GLM4_MOE
from slime_models.family.families.gpt_oss import GPT_OSS
from slime_models.family.families.latent_attention.deepseek_v3 import DEEPSEEK_V3, KIMI_K2
from slime_models.family.families.latent_attention.deepseek_v32 import DEEPSEEK_V32
from slime_models.family.families.latent_attention.glm4_moe_lite import GLM4_MOE_LITE
from slime_models.family.families.latent_attention.glm_moe_dsa import GLM_MOE_DSA
from slime_models.family.families.llama import LLAMA
from slime_models.family.families.mimo import MIMO
from slime_models.family.families.minimax_m2 import MINIMAX_M2
from slime_models.family.families.qwen2 import QWEN2
from slime_models.family.families.qwen2_moe import QWEN2_MOE
from slime_models.family.families.qwen3 import QWEN3
from slime_models.family.families.qwen3_5 import QWEN3_5, QWEN3_5_MOE, QWEN3_5_MOE_TEXT, QWEN3_5_TEXT
from slime_models.family.families.qwen3_moe import QWEN3_MOE
from slime_models.family.families.qwen3_next import QWEN3_NEXT
from slime_models.hf.config import read_config
from slime_models.hf.folder import HfCheckpoint
from slime_models.quantization.scheme import specs_of
from slime_models.transfer.receiver import UpdateReceiver
from slime_models.transfer.storage import UpdateStorage
from slime_torch.engine import TorchEngine
from slime_torch.section import TorchSection
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV3Config,
    DeepseekV32Config,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GlmConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    LlamaConfig,
    MiniMaxM2Config,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

VOCAB, EOS = 301, 300
FAMILIES = {
    family.model_type: family
    for family in (
        *(DEEPSEEK_V3, KIMI_K2, DEEPSEEK_V32, GLM4_MOE_LITE, GLM_MOE_DSA),
        *(GLM, GLM4, GLM4_MOE, GPT_OSS, LLAMA, MIMO, MINIMAX_M2, QWEN2, QWEN2_MOE),
        *(QWEN3, QWEN3_MOE, QWEN3_5, QWEN3_5_MOE, QWEN3_5_MOE_TEXT, QWEN3_5_TEXT, QWEN3_NEXT),
    )
}
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # At 0.2 float32 alone is up to 1.5e-5 from float64 in a log-prob, in transformers and here; at 0.1 it is 3e-6.
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_DELTA_NET = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 24,
    "layer_types": ["linear_attention", "full_attention"],
    "rms_norm_eps": 1e-2,  # a delta net's output is divided by its own size, which may be near zero
}
_EXPERTS = {
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 48,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
}
_FEW_EXPERTS = {
    "num_experts_per_tok": 4,
    "num_experts": 6,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 80,
}
_VISION = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
_LATENT = (
    _COMMON
    | {
        "pad_token_id": None,  # its row is zero: an indexer would rate all tokens alike, and the row's length decide
        "num_key_value_heads": 4,
        "kv_lora_rank": 20,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 48,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
    }
)
_INDEXER = {"index_topk": 6, "index_n_heads": 20, "index_head_dim": 16, "first_k_dense_replace": 1}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 32,
}
CONFIGS = {
    # As of DeepSeek-V3: the first layer is dense; of four groups of two experts, two are chosen.
    "deepseek_v3": lambda: DeepseekV3Config(
        **_LATENT,
        q_lora_rank=24,
        v_head_dim=16,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        rope_parameters=_YARN,
    ),
    # As of Kimi-K2: one group.
    "kimi_k2": lambda: DeepseekV3Config(
        **_LATENT,
        q_lora_rank=24,
        v_head_dim=16,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        rope_parameters=_YARN,
    ),
    # As of Moonlight: queries have no latent vector.
    "deepseek_v3-moonlight": lambda: DeepseekV3Config(
        **_LATENT,
        q_lora_rank=None,
        v_head_dim=20,
        n_group=1,
        topk_group=1,
        n_shared_experts=2,
        first_k_dense_replace=1,
    ),
    # An indexer chooses six tokens.
    "deepseek_v32": lambda: DeepseekV32Config(
        **_LATENT,
        **_INDEXER,
        q_lora_rank=24,
        v_head_dim=16,
        n_group=1,
        topk_group=1,
        rope_parameters=_YARN,
    ),
    "glm_moe_dsa": lambda: GlmMoeDsaConfig(**_LATENT, **_INDEXER, q_lora_rank=24, v_head_dim=24),
    "glm4_moe_lite": lambda: Glm4MoeLiteConfig(**_LATENT, q_lora_rank=24, v_head_dim=24),
    "llama": lambda: LlamaConfig(**_COMMON),
    "llama-rope3": lambda: LlamaConfig(**_COMMON, rope_parameters=_LLAMA3, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**_COMMON, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**_COMMON, head_dim=32),
    "glm4": lambda: Glm4Config(**_COMMON, head_dim=32),
    "glm": lambda: GlmConfig(**_COMMON, head_dim=32),
    "mimo": lambda: Qwen2Config(**_COMMON),  # whose decoder it has; transformers has none of its own
    "gpt_oss": lambda: GptOssConfig(
        **_COMMON, head_dim=16, num_local_experts=5, num_experts_per_tok=2, sliding_window=9
    ),
    "minimax_m2": lambda: MiniMaxM2Config(
        **_COMMON,
        head_dim=32,
        rotary_dim=16,  # as published; transformers before 5.19 wants it said again
        rope_parameters={"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
        num_local_experts=5,
        num_experts_per_tok=4,
    ),
    "qwen3_5_text": lambda: Qwen3_5TextConfig(**_COMMON, **_DELTA_NET),
    "qwen3_5_moe_text": lambda: Qwen3_5MoeTextConfig(**_COMMON, **_DELTA_NET, **_FEW_EXPERTS),
    # Beside a vision tower, as published.
    "qwen3_5": lambda: Qwen3_5Config(text_config=_COMMON | _DELTA_NET, vision_config=_VISION),
    "qwen3_5_moe": lambda: Qwen3_5MoeConfig(
        text_config=_COMMON | _DELTA_NET | _FEW_EXPERTS, vision_config=_VISION
    ),
    "qwen3_next": lambda: Qwen3NextConfig(
        **_COMMON, **_DELTA_NET, **_EXPERTS, num_experts=6, shared_expert_intermediate_size=80
    ),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **_COMMON, **_EXPERTS | {"norm_topk_prob": False}, num_experts=6, shared_expert_intermediate_size=80
    ),
    # The first layer is dense.
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **_COMMON, **_EXPERTS, head_dim=32, num_experts=6, mlp_only_layers=[0]
    ),
    # Of four groups of two experts, two are chosen.
    "glm4_moe": lambda: Glm4MoeConfig(
        **_COMMON,
        **_EXPERTS,
        head_dim=32,
        n_routed_experts=8,
        n_shared_experts=2,
        first_k_dense_replace=1,
        n_group=4,
        topk_group=2,
        routed_scaling_factor=1.5,
        use_qk_norm=True,
        attention_bias=True,
    ),
}


class ByteTokenizer:
    """Id i is the byte i; ids above 255 are special, and text only when they are not skipped."""

    eos_token_id: int | None = EOS

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        special = "" if skip_special_tokens else "<s>"
        pieces = (bytes([token]) if token < 256 else special.encode() for token in tokens)
        return b"".join(pieces).decode(errors="replace")

    def apply_chat_template(self, messages: Any, *, tools: Any = None, **kwargs: Any) -> str:
        raise NotImplementedError("no test renders messages")


class TinyModel:
    """A random model: the transformers module, float32, and its folder."""

    vocab, eos = VOCAB, EOS

    def __init__(self, kind: str, folder: Path, *, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.kind, self.folder = kind, folder
        config = CONFIGS[kind]()
        auto = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
        self.module = auto.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, parameter in (*self.module.named_parameters(), *self.module.named_buffers()):
                if "norm" in name or "bias" in name:  # which transformers starts at one and zero
                    parameter.add_(torch.randn_like(parameter) * 0.2)
                if name.endswith("A_log"):  # else states are forgotten within a token or two
                    parameter.sub_(3.0)
        self.module.save_pretrained(folder)
        if kind in (
            "mimo",
            "kimi_k2",
        ):  # transformers has no class for them, and the layers are those of another
            config = read_config(folder) | {"model_type": kind, "num_nextn_predict_layers": 0}
            (folder / "config.json").write_text(json.dumps(config))
        self.family = FAMILIES[kind.partition("-")[0]]
        self.architecture = self.family.architecture(read_config(folder))

    def engine(
        self,
        *,
        dtype: torch.dtype = torch.float32,
        keeps_cache: bool = False,
        with_routes: bool = False,
        **section: Any,
    ) -> TorchEngine:
        name, family, architecture = str(dtype).removeprefix("torch."), self.family, self.architecture
        storage = UpdateStorage(
            specs=specs_of(family.hf_shapes(architecture), dtype=name, float32=family.float32(architecture)),
            model_path=self.folder,
            staging_dir=self.folder / "staged",
            disk_dir=self.folder / "weights",
            keep_files=False,
            encoding="xor",
            timeout_s=60,
        )
        return TorchEngine(
            self.folder,
            family,
            ByteTokenizer(),
            dtype=dtype,
            section=TorchSection.model_validate(section),
            receiver=UpdateReceiver(storage, dtype=name, registry=Registry()),
            keeps_cache=keeps_cache,
            with_routes=with_routes,
        )

    @asynccontextmanager
    async def serving(self, **options: Any) -> AsyncIterator[TorchEngine]:
        engine = self.engine(**options)
        await engine.start()
        try:
            yield engine
        finally:
            await engine.close()

    def answers(
        self, prompts: Sequence[Sequence[int]], params: Sequence[SamplingParams], **options: Any
    ) -> list[Completion]:
        """Generate all at once on an engine of their own."""

        async def together() -> list[Completion]:
            async with asyncio.timeout(300), self.serving(**options) as engine:
                return await asyncio.gather(
                    *(engine.generate(p, q) for p, q in zip(prompts, params, strict=True))
                )

        return asyncio.run(together())

    @staticmethod
    def prompts(n: int, *, seed: int = 0, longest: int = 40) -> list[list[int]]:
        """Random prompts of different lengths."""
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(1, longest, (n,), generator=generator).tolist()
        return [torch.randint(0, EOS, (length,), generator=generator).tolist() for length in lengths]

    @torch.inference_mode()
    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Float32 logits [len(tokens), VOCAB] of one unpadded sequence."""
        return self.module(torch.tensor([list(tokens)])).logits[0].float()

    @torch.inference_mode()
    def greedy(self, prompt: Sequence[int], n: int) -> list[int]:
        """What transformers generates greedily."""
        ids = torch.tensor([list(prompt)])
        out = self.module.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False, eos_token_id=EOS
        )
        return out[0, len(prompt) :].tolist()

    def log_probs(
        self, prompt: Sequence[int], response: Sequence[int], temperature: float = 1.0
    ) -> list[float]:
        """Log-probs of a response by one forward pass of transformers."""
        rows = self.logits([*prompt, *response])[len(prompt) - 1 : -1] / temperature
        return rows.log_softmax(-1).gather(1, torch.tensor(response)[:, None]).squeeze(1).tolist()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Hugging Face name -> tensor of the folder, a tied output layer and what is not computed left out."""
        hf = HfCheckpoint(self.folder)
        left = self.family.left_over(hf, self.architecture)
        return {name: hf[name] for name in hf if name not in left}


@pytest.fixture
def tokenizer() -> ByteTokenizer:
    return ByteTokenizer()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TinyModel]:
    """Return the model of a kind (and seed), made once."""
    made: dict[str, TinyModel] = {}

    def model(kind: str, *, seed: int = 0) -> TinyModel:
        name = f"{kind}-{seed}"
        if name not in made:
            made[name] = TinyModel(kind, tmp_path_factory.mktemp(name), seed=seed)
        return made[name]

    return model
