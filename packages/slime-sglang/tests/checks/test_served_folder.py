"""What `slime check` finds wrong with the folder of `--sglang-model-path`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from slime_core.config.build import BuildContext
from slime_core.config.load import load_settings
from slime_core.plugins.registry import Registry
from slime_models.hf.config import read_config
from slime_models.hf.folder import save_hf
from slime_models.quantization.config import FIELD, FORMATS, Kept, read_quantization
from slime_models.quantization.folder import quantize_folder
from slime_sglang import hooks
from slime_sglang.checks.served_folder import not_computed

SIZES = {
    "vocab_size": 16,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 128}
#: One layer, which has a delta net.
DELTA_NET = {
    "linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention"], "shared_expert_intermediate_size": 128,
    "decoder_sparse_step": 1, "norm_topk_prob": True, "partial_rotary_factor": 0.25, "num_experts_per_tok": 2,
}  # fmt: skip


@pytest.fixture
def folders(registry, tmp_path):
    """Makes the folder of a model, and one of it quantised."""

    def make(model_type, method, **changes):
        family = registry.resolve("slime.models", model_type)
        config = {"model_type": model_type, **SIZES, **changes}
        (tmp_path / "config.json").write_text(json.dumps(config))
        shapes = family.hf_shapes(family.architecture(config))
        generator = torch.Generator().manual_seed(0)
        tensors = ((name, torch.randn(shape, generator=generator)) for name, shape in shapes.items())
        plain = save_hf(tmp_path / "plain", tensors, config_from=tmp_path)
        options = {"group_size": 32, "max_file_bytes": 10**9}
        quantize_folder(plain, tmp_path / "few", family, method=method, **options)
        return plain, tmp_path / "few"

    return make


@pytest.fixture
def problems(problems_of):
    """What is wrong with a run whose servers start from another folder than its trainer."""

    def find(plain: Path, served: Path | None, *more: str) -> list[str]:
        return problems_of(plain, *more, *([] if served is None else ["--sglang-model-path", str(served)]))

    return find


@pytest.mark.parametrize(
    ("model_type", "method", "changes"),
    [("qwen3", "fp8-block", {}), ("qwen3_moe", "fp8-block-ue8m0", EXPERTS)],
)
def test_a_folder_that_fits_has_no_problem(folders, problems, model_type, method, changes):
    assert problems(*folders(model_type, method, **changes)) == []


@pytest.mark.parametrize(("device", "on_cuda"), [((), True), (("--ray-device", "cpu"), False)])
def test_servers_that_a_launcher_starts_elsewhere_compute_on_gpus_unless_the_cpu_is_asked_for(
    folders, problems, device, on_cuda
):
    found = problems(*folders("qwen3", "fp8-channel"), "--launcher", "ray", *device)
    assert any("on a GPU; wanted float8 by blocks" in one for one in found) == on_cuda


def test_where_nothing_is_trained_a_folder_is_not_refused_for_what_updates_would_need(folders, problems):
    plain, few = folders("qwen3", "fp8-channel")
    on_gpus = "--launcher", "ray", "--train-backend", "none"
    assert problems(plain, few, *on_gpus) == []
    config = read_config(few)
    config[FIELD] = {"quant_method": "awq", "bits": 4}
    (few / "config.json").write_text(json.dumps(config))
    assert "quant_method: found 'awq'" in problems(plain, few, *on_gpus[:2])[0]
    assert problems(plain, few, *on_gpus) == []
    for other in ({"model_type": "gpt_neox"}, {"hidden_act": "gelu"}):
        (plain / "config.json").write_text(json.dumps(config | other))
        assert problems(plain, few, *on_gpus) == []


def test_what_sglang_would_compute_wrong_is_refused_also_where_nothing_is_trained(folders, problems):
    (problem,) = problems(*folders("llama", "fp8-block"), "--train-backend", "none")
    assert "found float8 by blocks of a llama; wanted another format" in problem


@pytest.mark.parametrize(
    ("model_type", "changes", "message"),
    [
        ("llama", {}, "found float8 by blocks of a llama; wanted another format"),
        (
            "qwen3",
            {"num_key_value_heads": 1},
            "k_proj.weight of 64 rows, one of 2 such tensors, in blocks of 128; wanted a multiple of 128",
        ),
    ],
)
def test_blocks_that_sglang_does_not_load_are_reported_beforehand(
    folders, problems, model_type, changes, message
):
    (problem,) = problems(*folders(model_type, "fp8-block", **changes))
    assert "sglang.model_path: found" in problem
    assert message in problem


@pytest.mark.parametrize(
    ("method", "device", "message"),
    [
        ("fp8-block", "cpu", None),
        ("fp8-block", "cuda", None),
        ("int4", "cpu", "experts.0.gate_proj.weight in few bits by other than blocks, without a GPU"),
        ("int4", "cuda", "a layout of its kernels' into which no update can be loaded"),
        ("fp8-channel", "cuda", "a layout of its kernels' into which no update can be loaded"),
        ("fp8-tensor", "cuda", "a layout of its kernels' into which no update can be loaded"),
    ],
)
def test_each_device_has_formats_that_it_does_not_compute(registry, method, device, message):
    family = registry.resolve("slime.models", "qwen3_moe")
    shapes = family.hf_shapes(family.architecture({"model_type": "qwen3_moe", **SIZES, **EXPERTS}))
    quantization = read_quantization({FIELD: FORMATS[method](Kept(), 32)})
    found = list(not_computed(quantization, shapes, model_type="qwen3_moe", device=device))
    assert len(found) == (message is not None)
    assert all(message in str(problem) for problem in found)


def change_config(folder, **changes):
    (folder / "config.json").write_text(json.dumps(read_config(folder) | changes))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda few: change_config(few, num_attention_heads=4), "whose config.json describes another model"),
        (
            lambda few: change_config(few, quantization_config={"quant_method": "gptq"}),
            "quantization_config.quant_method: found 'gptq'; wanted 'fp8' or 'compressed-tensors'",
        ),
        (lambda few: (few / "config.json").unlink(), "config.json: missing"),
        (lambda few: (few / "model.safetensors").unlink(), "found neither model.safetensors nor"),
        (
            lambda few: save_file(
                {
                    name: tensor
                    for name, tensor in load_file(few / "model.safetensors").items()
                    if "up_proj" not in name
                },
                few / "model.safetensors",
            ),
            "which lacks model.layers.0.mlp.up_proj.weight, model.layers.0.mlp.up_proj.weight_scale_inv",
        ),
    ],
)
def test_a_folder_that_is_another_or_not_whole_is_named(folders, problems, damage, message):
    plain, few = folders("qwen3", "fp8-block")
    damage(few)
    (problem,) = problems(plain, few)
    assert "sglang.model_path: found" in problem
    assert message in problem


def add_scales(folder, module):
    """Quantise a module beside those that were."""
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{module}.weight_scale_inv"] = torch.ones(1, 1)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("is_own", [True, False])
def test_a_folder_with_scales_of_what_no_update_quantises_is_refused(folders, problems, is_own):
    plain, few = folders("qwen3", "fp8-block")
    add_scales(few, "model.layers.0.linear_attn.out_proj")
    (problem,) = problems(few, None) if is_own else problems(plain, few)
    assert (
        f"{'model.hf_checkpoint' if is_own else 'sglang.model_path'}: found {few}, which has model.layers.0"
        in problem
    )
    assert "linear_attn.out_proj.weight_scale_inv: its servers would hold these matrices quantised" in problem


def test_scales_of_layers_that_are_not_of_the_model_are_no_problem(folders, problems):
    _, few = folders("qwen3_next", "fp8-block", **EXPERTS | DELTA_NET)
    assert problems(few, None) == []
    add_scales(few, "mtp.layers.0.self_attn.q_proj")
    assert problems(few, None) == []


def test_a_run_of_quantised_weights_is_not_refused_as_they_are_dequantised(folders, registry):
    from slime_models.hooks import slime_check_build

    _, few = folders("qwen3", "fp8-block")
    settings = load_settings(
        [],
        ["--rollout-batch-size", "1", "--rollout-max-response-len", "8", "--hf-checkpoint", str(few)],
        registry=registry,
    )
    build = BuildContext(
        settings=settings, registry=registry, load_tokenizer=lambda: None, model_path=few, run_dir=few.parent
    )
    assert slime_check_build(build=build) == []


def test_sglang_s_own_quantising_is_refused(registry):
    given = ["--rollout-batch-size", "1", "--rollout-max-response-len", "8", "--hf-checkpoint", "m"]
    given += ["--rollout-engine", "sglang"]
    settings = load_settings([], [*given, "--sglang-quantization", "fp8"], registry=registry)
    (problem,) = hooks.slime_check_config(settings=settings, registry=Registry.from_environment())
    assert "sglang.server_args.quantization: found an argument that slime gives the server itself" in str(
        problem
    )
