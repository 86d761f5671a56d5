"""Adapters: what is trained, that merging is W + (alpha / rank) B A, and the folders that other programs load."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file
from slime_core.errors import CheckpointError, TrainerError
from slime_megatron.settings.section import MegatronSection
from slime_megatron.settings.section_roles import LoraSection
from slime_models.hf.folder import HfCheckpoint
from transformers import AutoModelForCausalLM

from ..batches import hf_log_probs, make_batch
from ..comparison import near, sent
from ..host_copies import on_host
from ..views import recording

LORA = LoraSection(rank=4, alpha=6.0)


def lora(section=LORA):
    return {"settings": {"lora": section}}


def trained(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def test_adapters_alone_are_trained_and_begin_as_nothing(make_learner, qwen3):
    batch = make_batch()
    learner = make_learner(**lora())
    before = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    first = sent(learner)
    assert all(torch.equal(first[name], tensor) for name, tensor in HfCheckpoint(qwen3[1]).items())
    learner.train(batch)
    moved = {n for n, p in learner.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n in before if n.endswith("lora_b")}  # A has no gradient while B is 0
    learner.train(batch)
    moved = {n for n, p in learner.model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n in before if "lora_" in n} == set(trained(learner.model))


def test_each_adapter_has_the_size_of_its_layer(make_learner):
    learner = make_learner(**lora())
    sizes = {n.removeprefix("decoder.layers.0."): tuple(p.shape) for n, p in trained(learner.model).items()}
    # hidden 64, 4 query heads of 32 in 2 groups: 256 rows of qkv; MLP 112, gate and up 224
    for layer, rows, columns in (
        ("self_attention.linear_qkv", 256, 64),
        ("self_attention.linear_proj", 64, 128),
        ("mlp.linear_fc1", 224, 64),
        ("mlp.linear_fc2", 64, 112),
    ):
        assert sizes[f"{layer}.lora_a"] == (4, columns)
        assert sizes[f"{layer}.lora_b"] == (rows, 4)


def test_targets_are_chosen_by_name(make_learner):
    learner = make_learner(**lora(LoraSection(rank=2, target_modules=["linear_proj"])))
    assert {name.split(".", 3)[3] for name in trained(learner.model)} == {
        "self_attention.linear_proj.lora_a",
        "self_attention.linear_proj.lora_b",
    }


def test_merged_export_is_base_plus_scaled_ba_by_hand(make_learner, qwen3):
    learner = make_learner(lr=1e-2, **lora())
    for _ in range(3):
        learner.train(make_batch())
    base, merged = HfCheckpoint(qwen3[1]), sent(learner)
    layer = learner.model.decoder.layers[1]

    def delta(linear):
        return on_host((linear.lora_b @ linear.lora_a).detach()) * (6.0 / 4)

    # Megatron's qkv: per group its 2 queries, its key, its value, each of 32 rows
    qkv = delta(layer.self_attention.linear_qkv).reshape(2, 4, 32, 64)
    gate_up = delta(layer.mlp.linear_fc1)
    wanted = {
        "self_attn.q_proj": qkv[:, :2].reshape(128, 64),
        "self_attn.k_proj": qkv[:, 2].reshape(64, 64),
        "self_attn.v_proj": qkv[:, 3].reshape(64, 64),
        "self_attn.o_proj": delta(layer.self_attention.linear_proj),
        "mlp.gate_proj": gate_up[:112],
        "mlp.up_proj": gate_up[112:],
        "mlp.down_proj": delta(layer.mlp.linear_fc2),
    }
    for module, change in wanted.items():
        name = f"model.layers.1.{module}.weight"
        assert change.abs().max() > 1e-4
        torch.testing.assert_close(merged[name], base[name] + change, rtol=0, atol=1e-6)
    assert torch.equal(merged["model.norm.weight"], base["model.norm.weight"])


def test_the_adapted_model_and_the_merged_one_have_the_same_log_probs(make_learner, qwen3, tmp_path):
    batch = make_batch(lengths=((5, 9),))
    algorithm, views = recording()
    learner = make_learner(algorithm, lr=1e-2, **lora())
    learner.train(batch)
    merged = AutoModelForCausalLM.from_pretrained(qwen3[1])
    merged.load_state_dict(sent(learner), strict=False)
    learner.train(batch)
    torch.testing.assert_close(
        views[1].log_probs.detach(), hf_log_probs(merged.eval(), batch).detach(), rtol=0, atol=near(1e-5)
    )
    assert (views[1].log_probs - views[0].log_probs).abs().max() > 1e-2


def test_with_recomputed_layers_adapters_get_the_same_gradients(make_learner):
    found = []
    for granularity in (None, "full"):
        megatron = MegatronSection(recompute_granularity=granularity)
        learner = make_learner(megatron=megatron, **lora())
        for _ in range(2):
            learner.train(make_batch())
        found.append([p.main_grad.clone() for p in trained(learner.model).values()])
    assert all(torch.equal(a, b) and a.abs().max() > 0 for a, b in zip(*found, strict=True))


def test_the_reference_is_the_base_and_holds_no_second_model(make_learner, qwen3):
    batch = make_batch(lengths=((5, 9),))
    algorithm, views = recording("ref_log_probs")
    learner = make_learner(algorithm, lr=1e-2, **lora())
    for _ in range(2):
        learner.train(batch)
    assert set(learner._weight_sets._sets["ref"]) == set(trained(learner.model))
    torch.testing.assert_close(
        views[1].ref_log_probs, hf_log_probs(qwen3[0], batch).detach(), rtol=0, atol=near(1e-5)
    )


def test_a_reference_from_a_folder_has_no_adapter(make_learner, qwen3):
    batch = make_batch(lengths=((5, 9),))
    algorithm, views = recording("ref_log_probs")
    learner = make_learner(algorithm, lr=1e-2, settings={"lora": LORA, "ref_path": qwen3[1]})
    for _ in range(2):
        learner.train(batch)
    assert all(p.abs().max() > 0 for n, p in learner.model.named_parameters() if n.endswith("lora_b"))
    torch.testing.assert_close(views[1].ref_log_probs, views[0].ref_log_probs, rtol=0, atol=0)


@pytest.mark.parametrize("bf16", [False, True])
def test_resuming_adapters_equals_never_having_stopped(make_learner, tmp_path, bf16):
    learner = make_learner(bf16=bf16, lr=1e-2, **lora())
    learner.train(make_batch(seed=0))
    learner.save(tmp_path)
    learner.train(make_batch(seed=1))
    wanted = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    learner = make_learner(bf16=bf16, lr=1e-2, **lora())
    learner.load(tmp_path)
    learner.train(make_batch(seed=1))
    assert all(torch.equal(wanted[name], p) for name, p in learner.model.named_parameters())


def test_a_checkpoint_of_another_rank_is_refused(make_learner, tmp_path):
    make_learner(**lora()).save(tmp_path)
    with pytest.raises(CheckpointError, match=r"lora\.rank is 4, this trainer's is 8"):
        make_learner(**lora(LoraSection(rank=8, alpha=6.0))).load(tmp_path)


def test_the_peft_folder_merges_to_what_is_sent(make_learner, qwen3, tmp_path):
    learner = make_learner(lr=1e-2, **lora())
    for _ in range(2):
        learner.train(make_batch())
    learner.save_hf(tmp_path / "adapter")
    config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 4, 6.0)
    assert config["target_modules"] == [
        "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj",
    ]  # fmt: skip
    adapter, base = load_file(tmp_path / "adapter/adapter_model.safetensors"), HfCheckpoint(qwen3[1])
    assert len(adapter) == 3 * 7 * 2
    prefix = "base_model.model."
    for name, tensor in sent(learner).items():
        a = adapter.get(f"{prefix}{name.removesuffix('.weight')}.lora_A.weight")
        b = adapter.get(f"{prefix}{name.removesuffix('.weight')}.lora_B.weight")
        merged = base[name] if a is None else base[name] + 6.0 / 4 * (b @ a)
        torch.testing.assert_close(tensor, merged, rtol=0, atol=1e-6)
    learner.save_hf(tmp_path / "whole", merged=True)
    whole = HfCheckpoint(tmp_path / "whole")
    assert all(torch.equal(whole[name], tensor) for name, tensor in sent(learner).items())


def test_roles_that_start_from_a_checkpoint_with_adapters_start_from_the_adapted_model(
    make_learner, qwen3, tmp_path
):
    """The base and the merged model differ by far more than rounding."""
    batch = make_batch(lengths=((5, 9),))
    learner = make_learner(lr=1e-2, **lora())
    for _ in range(2):
        learner.train(batch)
    learner.save(tmp_path)
    wanted, base = sent(learner), HfCheckpoint(qwen3[1])
    algorithm, views = recording("ref_log_probs")
    learner = make_learner(algorithm, lr=0.0, settings={"actor_path": tmp_path, "ref_path": tmp_path})
    found = sent(learner)
    assert (
        found["model.layers.1.self_attn.o_proj.weight"] - base["model.layers.1.self_attn.o_proj.weight"]
    ).abs().max() > 1e-3
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-6)
    learner.train(batch)
    torch.testing.assert_close(views[0].ref_log_probs, views[0].log_probs.detach(), rtol=0, atol=near(1e-6))


def test_the_peft_folder_is_of_the_folder_that_the_policy_began_as(make_learner, qwen3, tmp_path):
    learner = make_learner(lr=1e-2)
    learner.train(make_batch())
    learner.save_hf(tmp_path / "sft")
    for start, base in ({"actor_path": tmp_path / "sft"}, tmp_path / "sft"), ({}, qwen3[1]):
        learner = make_learner(settings={"lora": LORA} | start)
        learner.save_hf(tmp_path / "adapter")
        config = json.loads((tmp_path / "adapter/adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(base)


def test_adapters_are_loaded_onto_the_base_that_they_were_trained_on(make_learner, tmp_path):
    learner = make_learner(lr=1e-2)
    learner.train(make_batch())
    learner.save_hf(tmp_path / "sft")
    start = {"lora": LORA, "actor_path": tmp_path / "sft"}
    make_learner(settings=start).save(tmp_path / "run")
    make_learner(settings=start).load(tmp_path / "run")
    with pytest.raises(
        CheckpointError, match="run: found other values of the parameters that are not trained than in"
    ):
        make_learner(**lora()).load(tmp_path / "run")


def test_a_folder_of_another_kind_is_not_written_over(make_learner, tmp_path):
    make_learner().save_hf(tmp_path / "model")
    learner = make_learner(**lora())
    with pytest.raises(CheckpointError, match="model: exists"):
        learner.save_hf(tmp_path / "model")
    learner.save_hf(tmp_path / "adapter")
    learner.save_hf(tmp_path / "adapter")
    with pytest.raises(CheckpointError, match="adapter: exists"):
        learner.save_hf(tmp_path / "adapter", merged=True)
    assert (tmp_path / "model/model.safetensors").exists()


def test_the_saved_model_is_the_trained_one_and_is_replaced_when_a_step_is_run_again(
    make_learner, qwen3, tmp_path
):
    learner = make_learner(lr=1e-2)
    for seed in range(2):
        learner.train(make_batch(seed=seed))
        learner.save_hf(tmp_path / "hf")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    last = sent(learner)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in last.items())
    assert not torch.equal(last["model.norm.weight"], qwen3[0].state_dict()["model.norm.weight"])
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").write_text("keep me")
    with pytest.raises(CheckpointError, match="mine: exists"):
        learner.save_hf(tmp_path / "mine")
    assert (tmp_path / "mine/notes.txt").exists()


@pytest.mark.parametrize(
    ("lists", "left"),
    [
        ({"only_train_params_name_list": [r"linear_fc\d", "final"]}, ("linear_fc1", "linear_fc2", "final")),
        ({"freeze_params_name_list": ["embedding", "norm", r"layers\.[01]\."]}, ("layers.2.",)),
    ],
)
def test_only_what_the_patterns_leave_is_trained(make_learner, lists, left):
    learner = make_learner(megatron=MegatronSection(**lists))
    before = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    learner.train(make_batch())
    moved = {n for n, p in learner.model.named_parameters() if not torch.equal(p, before[n])}
    wanted = {n for n in before if any(part in n for part in left)}
    if "freeze_params_name_list" in lists:
        wanted = {n for n in wanted if "norm" not in n}
    assert moved == wanted and moved


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (
            {"freeze_params_name_list": ["linear_q$"]},
            r"freeze_params_name_list: 'linear_q\$' matches no param",
        ),
        ({"freeze_params_name_list": ["."]}, "matches every parameter"),
    ],
)
def test_patterns_that_cannot_be_meant_are_refused(make_learner, lists, message):
    with pytest.raises(TrainerError, match=message):
        make_learner(megatron=MegatronSection(**lists))
