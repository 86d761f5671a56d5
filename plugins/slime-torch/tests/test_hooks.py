"""Which models the engine can generate with is told by their family, before anything is loaded."""

from __future__ import annotations

import dataclasses
import json

import pytest
from slime_core.config.build import BuildContext
from slime_core.config.load import load_settings
from slime_core.plugins.registry import Registry
from slime_models.family.families.dense import QKV_WEIGHT
from slime_models.family.families.llama import LLAMA
from slime_torch.hooks import slime_check_build, slime_check_config

from .conftest import CONFIGS

FUSED_QKV = dataclasses.replace(
    QKV_WEIGHT, hf=(("model.layers.{layer}.self_attn.qkv_proj.weight", ("qkv_size", "hidden_size")),)
)
#: The same family with layers of its own, of which an engine knows nothing.
LAYERED = dataclasses.replace(LLAMA, layers="somewhere:LAYERS")
UNSERVED = dataclasses.replace(LAYERED, not_served={"torch": "it would be wrong"})
#: A family that trains by its rules, and whose folders hold fused weights.
FUSED = dataclasses.replace(
    LLAMA,
    model_type="fused",
    architecture=lambda config: dataclasses.replace(
        LLAMA.architecture({**config, "model_type": "llama"}), model_type="fused"
    ),
    rules=tuple(FUSED_QKV if rule is QKV_WEIGHT else rule for rule in LLAMA.rules),
)


class _Families(Registry):
    """The installed plugins, and the family above."""

    def resolve(self, group, reference, *, flag=None):
        if group == "slime.models" and reference in (
            own := {"fused": FUSED, "layered": LAYERED, "unserved": UNSERVED}
        ):
            return own[reference]
        return super().resolve(group, reference, flag=flag)


@pytest.fixture
def problems(tmp_path):
    def check(model_type: str, *flags: str, has_weights: bool = True) -> list[str]:
        if has_weights:
            (tmp_path / "model.safetensors").touch()
        (tmp_path / "config.json").write_text(
            json.dumps(CONFIGS["llama"]().to_dict() | {"model_type": model_type})
        )
        registry = _Families()
        given = [
            "--hf-checkpoint",
            str(tmp_path),
            "--rollout-batch-size",
            "1",
            "--rollout-max-response-len",
            "8",
        ]
        settings = load_settings([], [*given, *flags], registry=registry)
        build = BuildContext(
            settings=settings,
            registry=registry,
            load_tokenizer=lambda: None,
            model_path=tmp_path,
            run_dir=tmp_path,
        )
        return [str(problem) for problem in slime_check_build(build=build)]

    return check


def test_a_family_whose_weights_the_engine_does_not_know_is_refused_by_name(problems):
    (problem,) = problems("fused")
    assert problem.startswith("rollout.rollout_engine: found torch with")
    assert "fused: the model has no model.layers.0.self_attn.q_proj.weight" in problem
    assert problems("fused", "--rollout-engine", "sglang") == []


def test_a_family_that_it_knows_is_taken(problems):
    assert problems("llama") == []


def test_a_family_that_brings_layers_is_refused_unless_it_says_so_itself(problems):
    (problem,) = problems("llama", "--model-name", "layered")
    assert "the torch engine does not know the layers that the family brings" in problem
    assert problems("llama", "--model-name", "unserved") == []  # slime-models repeats what the family says


def test_a_folder_without_weights_is_refused_on_this_machine(problems, tmp_path):
    (problem,) = problems("llama", has_weights=False)
    assert f"model.hf_checkpoint: found {tmp_path}, which has no weights; wanted model.safetensors" in problem
    assert problems("llama", "--launcher", "elsewhere", has_weights=False) == []


def test_a_cache_that_has_no_room_for_a_whole_context_is_refused(problems):
    context = CONFIGS["llama"]().max_position_embeddings
    (problem,) = problems("llama", "--torch-max-total-tokens", str(context - 1))
    assert problem.startswith(
        f"torch.max_total_tokens: found {context - 1}, and a context of {context} tokens"
    )
    assert problem.endswith(f"a shorter context: --torch-max-context-len {context - 1}")
    assert problems("llama", "--torch-max-total-tokens", str(context)) == []
    assert problems("llama", "--torch-max-total-tokens", "40", "--torch-max-context-len", "40") == []


def test_names_with_the_distribution_are_the_engines_own():
    flags = ["--hf-checkpoint", "m", "--rollout-batch-size", "1", "--rollout-max-response-len", "8"]
    flags += ["--rollout-engine", "slime-torch/torch", "--update-weight-transport", "nccl"]
    settings = load_settings([], flags, registry=(registry := Registry()))
    assert "train.update_weight_transport" in {p.where for p in slime_check_config(settings, registry)}
