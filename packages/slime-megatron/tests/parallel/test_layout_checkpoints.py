"""Checkpoints of one layout, gone on with under another: weights, the optimizer's state, and the steps that follow."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, load

from ..batches import make_batch
from ..layouts import BUCKETS, CONTEXT, EXPERT, PIPELINE, SEQUENCE, SHARED_STATE, TENSOR, WHOLE_STATE


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "qwen3_next"])
@pytest.mark.parametrize("shared", [False, True], ids=["", "distributed optimizer"])
def test_a_checkpoint_goes_on_under_another_layout(ranks, cut_models, kind, shared, tmp_path):
    adam = SHARED_STATE if shared else WHOLE_STATE
    batches = [make_batch(seed=seed) for seed in range(4)]
    common = {"folder": cut_models[kind], "checkpoint": tmp_path, "batches": batches, "moments": not shared}
    cut = adam | TENSOR | PIPELINE | (SEQUENCE if kind.startswith("qwen3_") else {})
    saved = ranks.run("save_and_go_on", 4, megatron=cut, **common)[0]
    loaded = ranks.run("resume", 2, megatron=adam, **common)[0]
    assert all(tensor.equal(loaded["weights"][name]) for name, tensor in saved["weights"].items())
    for kind_of_moment, moments in saved["moments"].items():
        assert all(tensor.equal(loaded["moments"][kind_of_moment][name]) for name, tensor in moments.items())
    for one, other in zip(saved["metrics"], loaded["metrics"], strict=True):
        assert other["train/loss"] == pytest.approx(one["train/loss"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [{}, TENSOR], ids=["", "tensor"])
@pytest.mark.parametrize("shared", [False, True], ids=["", "distributed optimizer"])
def test_a_checkpoint_of_some_layers_goes_on_under_another_layout(ranks, cut_models, cut, shared, tmp_path):
    adam = (SHARED_STATE if shared else WHOLE_STATE) | {"freeze_params_name_list": [r"layers\.0\."]}
    batches = [make_batch(seed=seed) for seed in range(4)]
    common = {"folder": cut_models["qwen3"], "checkpoint": tmp_path, "batches": batches, "moments": False}
    saved = ranks.run("save_and_go_on", 2, megatron=adam | cut, **common)[0]
    loaded = ranks.run("resume", 1, megatron=adam, **common)[0]
    assert all(tensor.equal(loaded["weights"][name]) for name, tensor in saved["weights"].items())
    for one, other in zip(saved["metrics"], loaded["metrics"], strict=True):
        assert other["train/loss"] == pytest.approx(one["train/loss"], abs=1e-6)


def tensors_of(folder):
    """Return every tensor of a checkpoint by its global name, however it was cut when it was written.

    Master weights are under the name that those of a distributed optimizer have.
    """
    listed = FileSystemReader(folder).read_metadata().state_dict_metadata
    found = {
        n: torch.empty(m.size, dtype=m.properties.dtype) for n, m in listed.items() if hasattr(m, "size")
    }
    load(found, storage_reader=FileSystemReader(folder), no_dist=True)
    return {name.replace(".fp32_param.", ".param."): tensor for name, tensor in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "train", "cuts"),
    [
        ("qwen3_moe", {}, [(2, EXPERT | WHOLE_STATE), (2, WHOLE_STATE), (2, EXPERT | WHOLE_STATE)]),
        ("qwen3_moe", {}, [(2, EXPERT), (2, {}), (2, EXPERT)]),
        (
            "glm4_moe",
            {"fp16": True},
            [(4, PIPELINE | EXPERT | WHOLE_STATE), (2, WHOLE_STATE), (4, PIPELINE | EXPERT | WHOLE_STATE)],
        ),
        ("glm4_moe", {"fp16": True}, [(4, PIPELINE | EXPERT), (1, {}), (4, PIPELINE | EXPERT)]),
    ],
    ids=[
        "",
        "distributed optimizer",
        "float16, a stage without experts",
        "distributed optimizer or not, float16",
    ],
)
def test_the_optimizers_state_survives_sharing_experts_out_and_back(
    ranks, cut_models, kind, train, cuts, tmp_path
):
    """Weights, master weights and moments, element by element; and by the next steps their number, of all optimizers."""
    batches, folder = [make_batch(seed=seed) for seed in range(4)], cut_models[kind]
    cuts = [(n, {"optimizer": "adam"} | megatron) for n, megatron in cuts]
    begun, *later = (
        cuts  # ranks that hold the same weights share the optimizer's state unless they are told not to
    )
    saved = ranks.run(
        "save_and_go_on", begun[0], folder=folder, checkpoint=tmp_path / "0", batches=batches, megatron=begun[1],
        moments=False, train=train,
    )[0]  # fmt: skip
    wanted = tensors_of(tmp_path / "0")
    moments = [name for name in wanted if "exp_avg" in name]
    assert any("experts" in name for name in moments)
    assert all(wanted[name].any() for name in moments)
    for number, cut in enumerate(later):
        metrics = ranks.run(
            "load_and_save", cut[0], folder=folder, checkpoint=tmp_path / str(number), output=tmp_path / str(number + 1),
            megatron=cut[1], batches=batches, train=train,
        )[0]  # fmt: skip
        found = tensors_of(tmp_path / str(number + 1))
        assert found.keys() == wanted.keys()
        assert all(tensor.equal(wanted[name]) for name, tensor in found.items())
        # As cut when it was written: the same, bit for bit. Else sums are in another order, which in float16 can turn the
        # rounding of weights after the first of these steps: by at most 2^-11 of a number (2e-4 of the gradients' norm was seen).
        bound = 0 if cut == cuts[0] else 2**-11 if "fp16" in train else 1e-6
        for one, other in zip(saved["metrics"], metrics, strict=True):
            for name in ("train/loss", "train/grad_norm"):
                assert other[name] == pytest.approx(one[name], rel=bound, abs=0)


def test_a_decoupled_learning_rate_goes_on_in_two_processes(ranks, cut_models, tmp_path):
    """Of embedding and output layer, in an optimizer whose state the two share."""
    common = {"folder": cut_models["qwen3"], "checkpoint": tmp_path, "moments": False}
    common |= {"batches": [make_batch(seed=seed) for seed in range(4)]}
    common |= {"megatron": SHARED_STATE | {"megatron_args": {"decoupled_lr": "0.5"}}}
    saved = ranks.run("save_and_go_on", 2, **common)[0]
    loaded = ranks.run("resume", 2, **common)[0]
    assert all(tensor.equal(loaded["weights"][name]) for name, tensor in saved["weights"].items())
    for one, other in zip(saved["metrics"], loaded["metrics"], strict=True):
        assert other["train/grad_norm"] == one["train/grad_norm"]


@pytest.mark.parametrize("bf16", [False, True], ids=["float32", "bfloat16"])
def test_one_process_and_several_read_each_others_state(ranks, cut_models, bf16, tmp_path):
    """By default several ranks share the optimizer's state, and one has it whole: what each stores is the other's, bit for bit."""
    common = {
        "folder": cut_models["qwen3"],
        "batches": [make_batch(seed=seed) for seed in range(3)],
        "train": {"bf16": bf16},
    }
    adam, folders = {"optimizer": "adam"}, [tmp_path / str(i) for i in range(4)]
    first = ranks.run("save_and_go_on", 1, checkpoint=folders[0], megatron=adam, moments=False, **common)[0]
    for i, n in enumerate((2, 1, 2)):
        metrics = ranks.run(
            "load_and_save", n, checkpoint=folders[i], output=folders[i + 1], megatron=adam, **common
        )[0]
        bound = 0 if n == 1 else 1e-2 if bf16 else 1e-5  # several ranks add gradients up in another order
        for name in ("train/loss", "train/grad_norm"):
            assert metrics[0][name] == pytest.approx(first["metrics"][0][name], rel=bound, abs=bound / 10)
    one, shared, again, twice = map(tensors_of, folders)
    assert any(tensor.any() for name, tensor in one.items() if "exp_avg_sq" in name)
    for wanted, found in ((one, again), (shared, twice)):
        assert found.keys() == wanted.keys()
        assert all(tensor.equal(wanted[name]) for name, tensor in found.items())
    assert all(tensor.equal(shared[name]) for name, tensor in one.items())


@pytest.mark.parametrize(
    ("n", "cut"),
    [(2, {"megatron_args": BUCKETS}), (4, PIPELINE)],
    ids=["DP2, buckets of 20,000", "PP2xDP2, whose embedding has a bucket of its own"],
)
def test_shared_state_in_padded_buckets_is_that_of_ranks_that_have_it_whole(
    ranks, cut_models, n, cut, tmp_path
):
    """And goes on: bit for bit as it was cut, and under other layouts."""
    folder = cut_models["qwen3"]
    padding = ranks.run("bucket_padding", n, folder=folder, megatron=SHARED_STATE | cut)
    assert any(any(of_buffer[:-1]) for of_rank in padding for of_buffer in of_rank)
    common = {"folder": folder, "batches": [make_batch(seed=seed) for seed in range(4)]}
    shared, whole = tmp_path / "shared", tmp_path / "whole"
    saved = ranks.run(
        "save_and_go_on", n, checkpoint=shared, megatron=SHARED_STATE | cut, moments=False, **common
    )[0]
    ranks.run("save_and_go_on", n, checkpoint=whole, megatron=WHOLE_STATE | cut, moments=False, **common)
    found, wanted = tensors_of(shared), tensors_of(whole)
    masters = {name for name in found if name.startswith("optimizer.state.param.")}  # of float32: the weights
    assert masters == {f"optimizer.state.param.{name}" for name in found if not name.startswith("optimizer.")}
    assert all(found[name].equal(found[name.removeprefix("optimizer.state.param.")]) for name in masters)
    assert found.keys() == wanted.keys() | masters
    assert all(found[name].equal(tensor) for name, tensor in wanted.items())
    others = ((2, SHARED_STATE, 1e-5), (1, WHOLE_STATE, 1e-5))
    for n_ranks, megatron, bound in ((n, SHARED_STATE | cut, 0), *others):
        resumed = ranks.run("resume", n_ranks, checkpoint=shared, megatron=megatron, moments=False, **common)
        for one, again in zip(saved["metrics"], resumed[0]["metrics"], strict=True):
            for name in ("train/loss", "train/grad_norm"):
                assert again[name] == pytest.approx(one[name], rel=bound, abs=bound / 10)


def test_one_of_the_ranks_that_share_the_optimizer_has_its_whole_state_on_the_host(ranks, cut_models):
    """While it is saved, and while it is loaded: master weights and two moments, float32."""
    found = ranks.run("checkpoint_bytes", 2, folder=cut_models["qwen3"], megatron=SHARED_STATE)
    (n_numbers, first), (_, second) = found
    assert first == [12 * n_numbers] * 2
    assert second == [0, 0]


@pytest.mark.parametrize("adam", [WHOLE_STATE, SHARED_STATE], ids=["", "distributed optimizer"])
def test_a_first_stage_that_trains_nothing_knows_the_number_of_steps(ranks, cut_models, adam, tmp_path):
    """Of two stages the first has the dense layer, and experts alone are trained: rank 0 writes for all."""
    alone = {"only_train_params_name_list": [r"\.experts\."]}
    common = {"folder": cut_models["glm4_moe"], "megatron": adam | PIPELINE | alone, "moments": False}
    common |= {"batches": [make_batch(seed=seed) for seed in range(5)], "checkpoint": tmp_path}
    saved = ranks.run("save_and_go_on", 4, **common)[0]
    loaded = ranks.run("resume", 4, **common)[0]
    assert len({metrics["train/loss"] for metrics in saved["metrics"]}) == 3
    for one, other in zip(saved["metrics"], loaded["metrics"], strict=True):
        for name in ("train/loss", "train/grad_norm"):
            assert other[name] == one[name]


def test_mtp_layers_resume_under_another_layout(ranks, mtp_model, tmp_path):
    on = {"enable_mtp_training": True} | WHOLE_STATE
    common = {"folder": mtp_model[1], "checkpoint": tmp_path, "moments": True}
    common["batches"] = [make_batch(seed=seed) for seed in range(3)]
    saved = ranks.run("save_and_go_on", 4, megatron=on | PIPELINE | EXPERT, **common)[0]
    loaded = ranks.run("resume", 2, megatron=on | CONTEXT, **common)[0]
    assert all(tensor.equal(loaded["weights"][name]) for name, tensor in saved["weights"].items())
    for kind_of_moment, moments in saved["moments"].items():
        assert all(tensor.equal(loaded["moments"][kind_of_moment][name]) for name, tensor in moments.items())
        assert moments["model.layers.2.eh_proj.weight"].any()
    for name in ("train/loss", "train/mtp_loss"):
        assert loaded["metrics"][0][name] == pytest.approx(saved["metrics"][0][name], abs=1e-6)
