"""Arguments of the reference's Megatron that describe the model, held against what its family reads from config.json.

Those that Megatron itself has are held against it by slime-megatron.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from slime_core.errors import Problem

if TYPE_CHECKING:
    from slime_models.family.architecture import Architecture

#: Module of layers, the last part of its name -> the model types that it builds.
_SPECS: Mapping[str, tuple[str, ...]] = {
    "glm4": ("glm4",),
    "glm4_moe": ("glm4_moe",),
    "glm5": ("glm_moe_dsa",),
    "glm5_2": ("glm_moe_dsa",),
    "deepseek_v32": ("deepseek_v32",),
    "minimax_m2": ("minimax_m2",),
    "mimo": ("mimo",),
    "qwen3_next": ("qwen3_next",),
    "qwen3_5": ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
}


def contradictions(given: Mapping[str, Any], architecture: Architecture) -> Iterator[Problem]:
    """Yield each argument that says of the model what its config.json does not."""
    for name, value in given.items():
        if name == "spec":
            yield from _spec(value, architecture.model_type)
            continue
        wanted = _described(name, architecture)
        try:
            found = value if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            found = value
        if found != wanted:
            yield Problem(
                f"--{name.replace('_', '-')}",
                str(value),
                f"{wanted}, by the model's config.json, for a {architecture.model_type} model",
                "drop the flag: the folder says it",
            )


def _described(name: str, architecture: Architecture) -> Any:
    if name in ("post_self_attn_layernorm", "post_mlp_layernorm"):
        return architecture.post_layernorms
    scaling = architecture.rope_scaling
    return float(getattr(scaling, name, None) or 1.0)


def _spec(value: Any, model_type: str) -> Iterator[Problem]:
    module = str(value[0] if isinstance(value, list) else value)
    last = module.rpartition(".")[2]
    if last not in _SPECS:
        yield Problem(
            "--spec",
            " ".join(value) if isinstance(value, list) else str(value),
            f"layers of a model that slime knows ({', '.join(_SPECS)})",
            "layers of your own are a model family: docs/add-a-model.md",
        )
    elif model_type not in _SPECS[last]:
        yield Problem(
            "--spec", module, f"the layers of a {model_type} model, by its config.json", "drop the flag"
        )
