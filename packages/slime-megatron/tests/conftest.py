"""Fixtures of the Megatron tests: tiny random models that transformers wrote, batches, and one learner at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from slime_core.config.sections import TrainSection
from slime_core.run.assemble import Algorithm
from slime_megatron import compat
from slime_megatron.settings.learner_settings import LearnerSettings
from slime_megatron.settings.section import MegatronSection
from slime_models.hf.config import read_config
from slime_models.hf.folder import HfCheckpoint, save_hf

from .algorithms import policy_gradient
from .tiny_models import DEEPSEEK, DELTA_NET, FAMILIES, GLM, INDEXER, VOCAB

if TYPE_CHECKING:
    from .ranks import Ranks


def pytest_configure(config: pytest.Config) -> None:
    """Ignore what Megatron's modules say to each other, and a user never sees."""
    config.addinivalue_line("filterwarnings", "ignore:Warning. tp_group is None:DeprecationWarning")
    config.addinivalue_line("filterwarnings", "ignore:`torch.distributed:FutureWarning")
    config.addinivalue_line("filterwarnings", "ignore:torch.distributed is disabled:UserWarning")
    config.addinivalue_line("filterwarnings", "ignore:Could not determine rank:UserWarning")


@pytest.fixture(scope="session", autouse=True)
def megatron() -> compat.Compat:
    """Import Megatron before a test does."""
    return compat.install()


@pytest.fixture(scope="session")
def make_hf(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Any, Path]]:
    """Return a function that makes a random transformers model, and the folder that it was saved to."""
    from transformers import AutoConfig, AutoModelForCausalLM

    def make(model_type: str, *, dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[Any, Path]:
        values = {
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 112,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
            "pad_token_id": None,  # else its row of the embedding has no gradient in transformers
            **changes,
        }
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values))
        generator = torch.Generator().manual_seed(0)
        with (
            torch.no_grad()
        ):  # larger than transformers draws them: logits spread, and norms and biases matter
            for name, parameter in model.named_parameters():
                neutral = parameter.mean() if "norm" in name else 0.0  # 1, or 0 where 1 + weight multiplies
                parameter.normal_(0.0, 0.15, generator=generator).add_(neutral)
            for name, buffer in model.named_buffers():
                if name.endswith("e_score_correction_bias"):
                    buffer.normal_(0.0, 0.15, generator=generator)
        folder = tmp_path_factory.mktemp(model_type)
        model.to(dtype).save_pretrained(folder)
        return model.eval(), folder

    return make


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Four processes for the ranks of small worlds, each of which ends with its job: of all modules, which import Megatron once.

    Also where this process has a GPU, they may compute on the CPU; see `Ranks`.
    """
    from .ranks import Ranks  # not above: the processes import this file too, by itself

    ranks = Ranks(4, tmp_path_factory.mktemp("ranks"))
    yield ranks
    ranks.close()


@pytest.fixture(scope="session")
def cut_models(make_hf: Callable[..., tuple[Any, Path]]) -> dict[str, Path]:
    """Folders of a tiny dense model and one of experts; an odd vocabulary, so that tensor parallelism pads it."""
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    }
    size = {"num_hidden_layers": 2, "vocab_size": VOCAB + 1, "head_dim": 32}
    _, dense = make_hf("qwen3", **size)
    _, moe = make_hf("qwen3_moe", tie_word_embeddings=False, **size, **experts)
    _, glm = make_hf("glm4_moe", tie_word_embeddings=False, **size, **GLM)
    _, sandwich = make_hf("glm4", tie_word_embeddings=False, **size)
    _, plain_glm = make_hf("glm", tie_word_embeddings=False, **size)
    few = {"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": False}
    _, sinks = make_hf("gpt_oss", **size, **few, sliding_window=6)
    _, all_heads = make_hf("minimax_m2", **size, **few, rotary_dim=16)
    size.pop("head_dim")
    _, latent = make_hf("deepseek_v3", tie_word_embeddings=False, **size | DEEPSEEK)
    _, sparse = make_hf("deepseek_v32", tie_word_embeddings=False, **size | DEEPSEEK | INDEXER)
    _, shared = make_hf(
        "qwen2_moe", tie_word_embeddings=False, **size, **experts, shared_expert_intermediate_size=80
    )
    _, qwen2 = make_hf("qwen2", tie_word_embeddings=False, **size)
    config = json.loads((qwen2 / "config.json").read_text()) | {"model_type": "mimo"}
    (qwen2 / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    _, windows = make_hf(
        "gemma3_text",
        **size,
        head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
        query_pre_attn_scalar=12,
    )
    _, next_moe = make_hf(
        "qwen3_next",
        tie_word_embeddings=False,
        **size,
        **experts,
        **DELTA_NET,
        shared_expert_intermediate_size=80,
    )
    _, next_dense = make_hf("qwen3_5_text", **size, **DELTA_NET)
    return {
        "qwen3_5_text": next_dense,
        "qwen3_next": next_moe,
        "qwen3": dense,
        "qwen3_moe": moe,
        "glm4_moe": glm,
        "deepseek_v3": latent,
        "deepseek_v32": sparse,
        "glm4": sandwich,
        "qwen2_moe": shared,
        "gemma3_text": windows,
        "glm": plain_glm,
        "mimo": qwen2,
        "gpt_oss": sinks,
        "minimax_m2": all_heads,
    }


@pytest.fixture(scope="session")
def make_mtp_model(
    make_hf: Callable[..., tuple[Any, Path]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., tuple[Any, Path]]:
    """Return a function that makes a tiny model of four layers, and a folder in which the last two predict the two tokens after the
    next."""

    def make(model_type: str, **changes: Any) -> tuple[Any, Path]:
        size = {"num_hidden_layers": 4, "vocab_size": VOCAB + 1, "tie_word_embeddings": False}
        model, made = make_hf(model_type, **size, **changes)
        weights = dict(HfCheckpoint(made))
        generator = torch.Generator().manual_seed(1)
        for layer in (2, 3):
            for name, shape in (
                ("enorm", (64,)),
                ("hnorm", (64,)),
                ("shared_head.norm", (64,)),
                ("eh_proj", (64, 128)),
            ):
                drawn = 0.15 * torch.randn(shape, generator=generator)
                weights[f"model.layers.{layer}.{name}.weight"] = drawn + 1 if len(shape) == 1 else drawn
            for copy, original in (("embed_tokens", "model.embed_tokens"), ("shared_head.head", "lm_head")):
                weights[f"model.layers.{layer}.{copy}.weight"] = weights[f"{original}.weight"]
        folder = save_hf(tmp_path_factory.mktemp("mtp") / "hf", weights.items(), config_from=made)
        config = json.loads((made / "config.json").read_text())
        of_decoder = {
            name: kinds[:2]
            for name, kinds in config.items()
            if name.endswith(("layer_types", "indexer_types")) and kinds
        }
        config |= of_decoder | {"num_hidden_layers": 2, "num_nextn_predict_layers": 2}
        (folder / "config.json").write_text(json.dumps(config))
        return model, folder

    return make


@pytest.fixture(scope="session")
def mtp_model(make_mtp_model: Callable[..., tuple[Any, Path]]) -> tuple[Any, Path]:
    """A tiny GLM with two MTP layers; see `make_mtp_model`."""
    return make_mtp_model("glm4_moe", head_dim=32, **GLM)


@pytest.fixture(scope="session")
def latent_mtp_model(make_mtp_model: Callable[..., tuple[Any, Path]]) -> tuple[Any, Path]:
    """A tiny DeepSeek-V3 with two MTP layers; see `make_mtp_model`."""
    return make_mtp_model("deepseek_v3", **DEEPSEEK)


@pytest.fixture(scope="session")
def qwen3(make_hf: Callable[..., tuple[Any, Path]]) -> tuple[Any, Path]:
    """A tiny Qwen 3, and its folder."""
    return make_hf("qwen3", head_dim=32)


@pytest.fixture(scope="session")
def other(qwen3: tuple[Any, Path], tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """A model of that architecture with other weights, and its folder."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(qwen3[1])
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    folder = tmp_path_factory.mktemp("other")
    model.save_pretrained(folder)
    return model.eval(), folder


@pytest.fixture
def make_learner(qwen3: tuple[Any, Path]) -> Iterator[Callable[..., Any]]:
    """Return a function that builds a learner on the tiny Qwen 3, the whole or one of its roles alone; a new one ends the one before.

    `settings` are other fields of `LearnerSettings`, and what is left those of `TrainSection`.
    """
    from slime_megatron.learner.critic_learner import CriticLearner
    from slime_megatron.learner.frozen_learner import FrozenLearner
    from slime_megatron.learner.learner import Learner

    alive: list[Any] = []

    def close() -> None:
        while alive:
            alive.pop().close()

    def make(
        algorithm: Algorithm | None = None,
        *,
        folder: Path = qwen3[1],
        megatron: MegatronSection | None = None,
        settings: dict[str, Any] | None = None,
        role: str = "policy",
        **train: Any,
    ) -> Any:
        close()
        alive.append(
            {"policy": Learner, "critic": CriticLearner, "ref": FrozenLearner}[role](
                LearnerSettings(
                    model_path=folder,
                    family=FAMILIES[read_config(folder)["model_type"]],
                    train=TrainSection(**{"bf16": False, "lr": 1e-3, "clip_grad": 0.0} | train),
                    megatron=megatron or MegatronSection(),
                    seed=1,
                    algorithm=algorithm or policy_gradient(),
                    **settings or {},
                )
            )
        )
        return alive[-1]

    yield make
    close()
