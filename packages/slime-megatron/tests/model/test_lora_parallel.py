"""Adapters under every layout against one process: gradients, steps, weights out, PEFT folders, checkpoints."""

from __future__ import annotations

import pytest
from safetensors.torch import load_file
from slime_megatron.settings.section_roles import LoraSection

from ..batches import make_batch
from ..layouts import DESCENT, LAYOUTS, largest_difference, settings_of

LORA = LoraSection(rank=4, alpha=6.0)
#: Kind of model -> layouts. Experts are cut whole.
CUTS = {
    "qwen3": ["TP2", "TP2+SP", "PP2", "CP2", "DP2+distributed optimizer", "TP2xPP2"],
    "deepseek_v3": ["TP2xEP2xSP"],
    "qwen3_moe": ["EP2", "TP2xEP2xSP", "PP2xEP2"],
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", [*("qwen3", "deepseek_v3"), pytest.param("qwen3_moe", marks=pytest.mark.faults)]
)
def test_adapters_take_the_steps_of_one_process(ranks, cut_models, kind, tmp_path, capsys):
    batches = [make_batch(seed=seed) for seed in range(3)]
    wanted = {}
    for optimizer, train in (("sgd", {}), ("adam", DESCENT)):
        wanted[optimizer] = ranks.run(
            "train_adapters", 1, folder=cut_models[kind], batches=batches, megatron={"optimizer": optimizer},
            train=train, lora=LORA, output=folder(tmp_path, optimizer),
        )[0]  # fmt: skip
        assert (
            largest_difference(wanted[optimizer]["before"], wanted[optimizer]["after"], relative=False) > 1e-4
        )
        assert all(gradient.abs().max() > 0 for gradient in wanted[optimizer]["gradients"].values())
    rows = []
    for layout in CUTS[kind]:
        n, megatron = settings_of(kind, layout)
        optimizer = megatron.get("optimizer", "sgd")
        train = DESCENT if optimizer == "adam" else {}
        common = {"folder": cut_models[kind], "batches": batches, "lora": LORA, "train": train}
        one, own = wanted[optimizer], folder(tmp_path, layout)
        found = ranks.run("train_adapters", n, megatron=megatron, output=own, **common)[0]
        # The checkpoint of one process under this layout; where Megatron's optimizer is another one, its own.
        shares_state = "use_distributed_optimizer" in megatron or "expert_model_parallel_size" in megatron
        load = own if shares_state else tmp_path / optimizer
        resumed = ranks.run("train_adapters", n, megatron=megatron, output=own, load=load, **common)[0]
        for each in (found, resumed):
            rows.append(
                (
                    layout,
                    largest_difference(each["gradients"], one["gradients"], relative=True),
                    largest_difference(each["before"], one["before"], relative=False),
                    largest_difference(each["after"], one["after"], relative=False),
                    abs(each["metrics"]["train/grad_norm"] / one["metrics"]["train/grad_norm"] - 1),
                )
            )
        adapters, alone = (
            load_file(path / "peft/adapter_model.safetensors") for path in (own, tmp_path / optimizer)
        )
        assert largest_difference(adapters, alone, relative=False) <= 1e-6
    with capsys.disabled():
        print(f"\nadapters, {kind:20} gradients  weights after 3 and 4 steps  norm   (then: after loading)")
        for layout, *differences in rows:
            print(f"{layout:30} " + "  ".join(f"{difference:7.1e}" for difference in differences))
    assert max(row[1] for row in rows) <= 1e-5
    assert max(max(row[2:4]) for row in rows) <= 1e-6
    assert max(row[4] for row in rows) <= 1e-5


@pytest.mark.slow
def test_adapters_saved_in_four_parts_are_read_by_one_process(ranks, cut_models, tmp_path):
    batches = [make_batch(seed=seed) for seed in range(3)]
    common = {"folder": cut_models["qwen3"], "batches": batches, "lora": LORA, "train": {"lr": 1e-2}}
    n, megatron = LAYOUTS["TP2xPP2"]
    megatron = megatron | {"optimizer": "adam"}
    cut = ranks.run("train_adapters", n, megatron=megatron, output=folder(tmp_path, "cut"), **common)[0]
    one = ranks.run(
        "train_adapters", 1, megatron={"optimizer": "adam"}, output=tmp_path, load=tmp_path / "cut", **common
    )[0]
    assert all(one["before"][name].equal(tensor) for name, tensor in cut["before"].items())
    assert one["metrics"]["train/loss"] == pytest.approx(cut["metrics"]["train/loss"], abs=1e-6)
    assert largest_difference(one["gradients"], cut["gradients"], relative=True) <= 1e-5


@pytest.mark.parametrize("targets", [None, ["linear_qkv", "linear_proj"]])
def test_cut_experts_take_no_adapters(ranks, cut_models, tmp_path, targets):
    lora = LORA if targets is None else LORA.model_copy(update={"target_modules": targets})
    n, megatron = settings_of("qwen3_moe", "TP2+SP")
    found = ranks.run("refusal", n, folder=cut_models["qwen3_moe"], megatron=megatron, lora=lora)
    message = (
        "lora.rank: tensor parallelism cuts experts into 2 parts, and adapters within experts cannot be cut; "
    )
    assert all(each.startswith(message) if targets is None else each == "none" for each in found)


def folder(parent, name):
    """Return a new folder."""
    (parent / name).mkdir()
    return parent / name
