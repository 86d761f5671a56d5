"""Every layout against one process: gradients, steps, losses, weights out."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from slime_megatron import compat
from slime_megatron.testing import random_model
from slime_models.hf.folder import HfCheckpoint

from ..batches import make_batch
from ..comparison import conversations
from ..layouts import (
    ALIKE,
    BUCKETS,
    CONTEXT,
    DENSE,
    DESCENT,
    EXPERT,
    LAYOUTS,
    PIPELINE,
    SEQUENCE,
    SHARED_STATE,
    TENSOR,
    largest_difference,
    settings_of,
    with_shared_prompts,
)
from ..tiny_models import DEEPSEEK, DELTA_NET, INDEXER, VOCAB


@pytest.mark.slow
@pytest.mark.proves("{kind}", "tensor", "sequence", "pipeline", "context", "expert", "optimizer")
@pytest.mark.parametrize(
    "kind",
    [
        "qwen3",
        *(
            pytest.param(kind, marks=pytest.mark.faults)
            for kind in (
                *DENSE,
                "deepseek_v3",
                "gpt_oss",
                "minimax_m2",
                "qwen2_moe",
                "qwen3_moe",
                "qwen3_next",
            )
            if kind not in (*ALIKE, "qwen3")
        ),
    ],
)
def test_every_layout_takes_the_steps_of_one_process(ranks, cut_models, kind, capsys):
    check_layouts(ranks, cut_models[kind], kind, LAYOUTS, n_steps=3, capsys=capsys)


@pytest.mark.slow
@pytest.mark.proves("{kind}", "tensor", "sequence", "pipeline", "context", "expert", "optimizer")
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(
            kind, marks=[pytest.mark.faults] * (kind not in ("deepseek_v32", "llama", "qwen3_5_moe_text"))
        )
        for kind in ALIKE
    ],
)
def test_two_ranks_take_a_step_of_one_process(ranks, cut_models, make_hf, kind, tmp_path, capsys):
    """Of models whose layers are those of others, for which every layout is tried."""
    folder = cut_models[kind] if kind in cut_models else alike(make_hf, kind, tmp_path)
    layouts = ("TP2", "TP2+SP", "PP2", "CP2", "EP2", "DP2+distributed optimizer")
    check_layouts(ranks, folder, kind, layouts, n_steps=1, capsys=capsys)


#: Of the text models that are beside a vision tower.
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": None,
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}
#: Parts of the names of tensors that no gradient trains.
UNTRAINED = ("e_score_correction_bias", ".indexer.")


def alike(make_hf, kind, tmp_path):
    """Return the folder of a tiny model; an odd vocabulary, so that tensor parallelism pads it."""
    size = {"num_hidden_layers": 2, "vocab_size": VOCAB + 1, "tie_word_embeddings": False}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
    if kind in ("qwen3_5", "qwen3_5_moe"):  # beside a vision tower, as published
        text = (
            size
            | SIZES
            | DELTA_NET
            | ({} if kind == "qwen3_5" else experts | {"shared_expert_intermediate_size": 80})
        )
        config = {
            "model_type": kind,
            "tie_word_embeddings": False,
            "text_config": text,
            "vision_config": VISION,
        }
        return random_model(config, tmp_path / "hf", shift={"A_log": -3.0})
    if kind == "kimi_k2":
        folder = make_hf("deepseek_v3", **size | DEEPSEEK | {"n_group": 1, "topk_group": 1})[1]
        config = json.loads((folder / "config.json").read_text()) | {"model_type": kind}
        (folder / "config.json").write_text(json.dumps(config))
        return folder
    own = {
        "llama": {},
        "qwen2": {},
        "glm4_moe_lite": DEEPSEEK | {"n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse"]},
        "glm_moe_dsa": DEEPSEEK | INDEXER | {"n_group": 1, "topk_group": 1},
        "qwen3_5_moe_text": experts | DELTA_NET | {"shared_expert_intermediate_size": 80},
    }
    return make_hf(kind, **size | own[kind])[1]


def check_layouts(ranks, folder, kind, layouts, *, n_steps, capsys):
    common = {"folder": folder, "batch": make_batch(), "n_steps": n_steps}
    wanted = {}
    for optimizer, train in (("sgd", {}), ("adam", DESCENT)):
        job = ranks.run(
            "train", 1, megatron={"optimizer": optimizer}, train=train | {"max_tokens_per_gpu": 40}, **common
        )
        wanted[optimizer] = job[0]
        before = HfCheckpoint(folder)
        moved = {name: (tensor - before[name]).abs().max() for name, tensor in job[0][2].items()}
        assert all(by > 1e-5 for name, by in moved.items() if not any(part in name for part in UNTRAINED))
    rows = []
    for layout in layouts:
        if (settings := settings_of(kind, layout)) is None:
            continue
        n, megatron = settings
        optimizer = megatron.get("optimizer", "sgd")
        train = {"max_tokens_per_gpu": 40} | (DESCENT if optimizer == "adam" else {})
        found = ranks.run("train", n, megatron=megatron, train=train, **common)
        one, (metrics, gradients, weights) = wanted[optimizer], found[0]
        rows.append(
            (
                layout,
                largest_difference(gradients, one[1], relative=True),
                largest_difference(weights, one[2], relative=False),
                max(abs(metrics[name] - one[0][name]) for name in metrics if name.startswith("train/")),
            )
        )
        for other, _, _ in found:
            assert {k: v for k, v in other.items() if "time" not in k} == {
                k: v for k, v in metrics.items() if "time" not in k
            }
    with capsys.disabled():
        print(f"\n{kind:30} gradients  weights after  metrics")
        for layout, gradient, weight, metric in rows:
            print(f"{layout:30} {gradient:9.1e}  {weight:13.1e}  {metric:7.1e}")
    assert max(row[1] for row in rows) <= 1e-5
    assert max(row[2] for row in rows) <= 1e-6
    assert max(row[3] for row in rows) <= 1e-5


@pytest.mark.parametrize(
    ("kind", "layouts"),
    [
        ("qwen3", ["TP2xPP2", "PP2xCP2", "CP2xDP2+distributed optimizer"]),
        ("qwen3_moe", ["PP2xEP2", "PP2xCP2", "TP2xDP2"]),
        ("glm4_moe", ["PP2xEP2", "TP2+SP"]),  # the first of two stages has no experts
        ("glm4", ["TP2+SP", "TP2xPP2"]),
        ("qwen2_moe", ["TP2xEP2xSP", "PP2xEP2"]),
        ("deepseek_v3", ["TP2xEP2xSP", "PP2xCP2"]),
        ("deepseek_v32", ["TP2xEP2xSP", "PP2xCP2"]),
        ("gpt_oss", ["TP2xEP2xSP", "PP2xCP2"]),
        ("minimax_m2", ["TP2xEP2xSP", "PP2xCP2"]),
        ("qwen3_next", ["TP2xEP2xSP", "PP2xEP2"]),
        ("qwen3_5_text", ["TP2", "DP2+distributed optimizer"]),
    ],
)
def test_later_steps_know_the_log_probs_from_before_the_first(ranks, cut_models, kind, layouts):
    """Three optimizer steps of one batch: old log-probs come from a forward pass of their own, over all ranks."""
    batch = make_batch(n_steps=3)
    wanted = {}
    for layout in layouts:
        n, megatron = settings_of(kind, layout)
        train = DESCENT if megatron.get("optimizer") == "adam" else {}
        optimizer = megatron.get("optimizer", "sgd")
        common = {"folder": cut_models[kind], "batch": batch, "train": train | {"max_tokens_per_gpu": 40}}
        if optimizer not in wanted:
            wanted[optimizer] = ranks.run("train", 1, megatron={"optimizer": optimizer}, **common)[0]
        one, found = wanted[optimizer], ranks.run("train", n, megatron=megatron, **common)[0]
        assert found[0]["train/loss"] == pytest.approx(one[0]["train/loss"], abs=1e-6)
        mismatch = "train/train_rollout_logprob_abs_diff"
        assert found[0][mismatch] == pytest.approx(one[0][mismatch], abs=1e-5)
        assert largest_difference(found[1], one[1], relative=True) <= 1e-5


@pytest.mark.parametrize(
    ("kind", "layouts"), [("qwen3", ["TP2", "PP2", "CP2"]), ("qwen3_moe", ["TP2xEP2xSP", "PP2xEP2"])]
)
def test_shared_turns_and_forks_train_alike_in_every_layout(ranks, cut_models, kind, layouts):
    """Against each sample by itself in one process; context-parallel ranks share nothing, and forward all tokens."""
    batch = conversations()
    common = {"folder": cut_models[kind], "batch": batch, "train": {"max_tokens_per_gpu": 90}}
    one = ranks.run("train", 1, megatron={"share_prefix": False}, **common)[0]
    for layout in layouts:
        n, megatron = settings_of(kind, layout)
        found = ranks.run("train", n, megatron=megatron, **common)[0]
        shares = found[0]["perf/forwarded_tokens"] < one[0]["perf/forwarded_tokens"]
        assert shares == ("CP2" not in layout)
        assert found[0]["train/loss"] == pytest.approx(one[0]["train/loss"], abs=1e-6)
        assert largest_difference(found[1], one[1], relative=True) <= 1e-5


def masked(batch, reduction):
    """Return the batch with one sample masked whole, and weights of that reduction."""
    mask = batch.loss_mask.copy()
    mask[batch.response_offsets[2] : batch.response_offsets[3]] = 0
    sample = np.repeat(np.arange(len(batch)), batch.response_lengths)
    tokens = np.bincount(sample, mask)
    weights = mask / mask.sum() if reduction == "token" else mask / np.maximum(tokens, 1)[sample] / len(batch)
    return replace(batch, loss_mask=mask, weights=weights.astype(np.float32))


#: Ranks, most tokens of a micro-batch, Megatron's settings.
CUTS = [
    (1, 1000, {}),
    (1, 40, {}),
    (1, 20, {}),
    (1, 1000, {"share_prefix": False}),
    (1, 20, {"share_prefix": False}),
    (2, 1000, {}),
    (2, 20, {}),
    (2, 40, {"balance_data": False}),
    (4, 12, {"share_prefix": False}),  # seven samples that fit alone: one of four ranks runs one uncounted
    (2, 40, CONTEXT),
    (2, 15, CONTEXT),
    (4, 20, CONTEXT),
]


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["sample", "token"])
def test_loss_and_gradient_norm_do_not_depend_on_the_cut(ranks, cut_models, reduction):
    batch = masked(with_shared_prompts(), reduction)
    found = []
    for n, max_tokens, megatron in CUTS:
        train = {"max_tokens_per_gpu": max_tokens}
        job = ranks.run("train", n, folder=cut_models["qwen3"], batch=batch, megatron=megatron, train=train)
        found.append(job[0][0])
    assert abs(found[0]["train/loss"]) > 1e-2
    for metrics in found:
        assert metrics["train/loss"] == pytest.approx(found[0]["train/loss"], abs=1e-6)
        assert metrics["train/grad_norm"] == pytest.approx(found[0]["train/grad_norm"], rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "n", "megatron"),
    [
        ("qwen3", 4, TENSOR | PIPELINE),
        ("qwen3", 2, CONTEXT),
        ("qwen3_moe", 4, TENSOR | SEQUENCE | EXPERT | {"expert_tensor_parallel_size": 1}),
        ("qwen3_moe", 4, PIPELINE | EXPERT),
        ("glm4_moe", 4, TENSOR | SEQUENCE | PIPELINE),
        ("glm4", 4, TENSOR | PIPELINE),
        ("gemma3_text", 4, TENSOR | PIPELINE),
        ("gpt_oss", 4, TENSOR | SEQUENCE | EXPERT | {"expert_tensor_parallel_size": 1}),
        ("minimax_m2", 4, TENSOR | SEQUENCE | PIPELINE),
        ("qwen2_moe", 4, TENSOR | SEQUENCE | EXPERT | {"expert_tensor_parallel_size": 1}),
        ("deepseek_v3", 4, TENSOR | SEQUENCE | PIPELINE),
        ("deepseek_v32", 2, TENSOR | SEQUENCE),
        ("qwen3_next", 4, TENSOR | SEQUENCE | EXPERT | {"expert_tensor_parallel_size": 1}),
        ("qwen3_5_text", 4, TENSOR | PIPELINE),
    ],
)
def test_weights_come_out_of_every_layout_as_they_went_in(ranks, cut_models, kind, n, megatron):
    size = 20_000
    sizes, weights = ranks.run(
        "export",
        n,
        folder=cut_models[kind],
        megatron=megatron | {"update_weight_buffer_size": size},
        dtype="float32",
    )[0]
    original = HfCheckpoint(cut_models[kind])
    assert weights.keys() == set(original)
    assert all(weights[name].equal(original[name]) for name in original)
    largest = max(tensor.nbytes for tensor in weights.values())
    assert len(sizes) > 10
    assert max(sizes) <= max(size, largest)


@pytest.mark.parametrize(
    "layout", [{"optimizer": "adam"}, EXPERT, PIPELINE, CONTEXT], ids=["DP2", "EP2", "PP2xDP2", "CP2"]
)
def test_gradients_that_are_added_up_during_the_backward_pass_are_the_same_bits(ranks, cut_models, layout):
    """As is done on CUDA, in several buckets; over several micro-batches."""
    common = {
        "folder": cut_models["qwen3_moe"],
        "batch": with_shared_prompts(),
        "train": {"max_tokens_per_gpu": 20},
    }
    n, in_buckets = 4 if layout is PIPELINE else 2, layout | {"megatron_args": BUCKETS}
    padding = ranks.run("bucket_padding", n, folder=common["folder"], megatron=in_buckets)
    assert all(len(of_buffer) > 1 for of_buffer in padding[0])
    _, wanted, weights = ranks.run("train", n, megatron=layout, n_steps=2, **common)[0]
    _, found, moved = ranks.run("train", n, megatron=in_buckets, n_steps=2, **common)[0]
    assert all(gradient.any() for name, gradient in wanted.items() if "experts" not in name)
    for one, other in ((wanted, found), (weights, moved)):
        assert one.keys() == other.keys()
        assert all(one[name].equal(other[name]) for name in one)


def test_a_context_parallel_rank_without_response_tokens_trains(ranks, cut_models):
    """The first rank has the end of each sequence, and so every response; gradients are added up as on CUDA."""
    in_buckets = CONTEXT | {"megatron_args": BUCKETS}
    common = {"folder": cut_models["qwen3_moe"], "batch": make_batch(lengths=((20, 1), (20, 1), (19, 1)))}
    assert len(ranks.run("bucket_padding", 2, folder=common["folder"], megatron=in_buckets)[0][0]) > 1
    common["train"] = {"max_tokens_per_gpu": 40}
    _, wanted, _ = ranks.run("train", 1, megatron={}, **common)[0]
    _, found, _ = ranks.run("train", 2, megatron=in_buckets, **common)[0]
    assert largest_difference(found, wanted, relative=True) <= 1e-5


@pytest.mark.faults
@pytest.mark.parametrize("kind", ["mtp_model", "latent_mtp_model"])
def test_mtp_layers_learn_under_every_layout_as_in_one_process(ranks, kind, request):
    """Beside a policy whose routers have a loss and a bias that moves; the last stage has no embedding of its own."""
    mtp_model = request.getfixturevalue(kind)
    flags = {"moe_router_enable_expert_bias": True, "moe_z_loss_coeff": "1e-3"}
    on = {"enable_mtp_training": True, "megatron_args": flags}
    common = {"folder": mtp_model[1], "batch": with_shared_prompts(), "train": {"max_tokens_per_gpu": 40}}
    one, gradients, weights = ranks.run("train", 1, megatron=on, n_steps=2, **common)[0]
    assert any(name.startswith("model.layers.3.self_attn") for name in gradients)
    for layout in ("TP2+SP", "PP2xEP2", "CP2"):
        n, megatron = settings_of("glm4_moe", layout)
        found = ranks.run("train", n, megatron=megatron | on, n_steps=2, **common)[0]
        for name in ("train/loss", "train/mtp_1_loss", "train/mtp_2_loss", "train/z_loss"):
            assert found[0][name] == pytest.approx(one[name], abs=1e-6), layout
        assert largest_difference(found[1], gradients, relative=True) <= 1e-5
        assert largest_difference(found[2], weights, relative=False) <= 1e-6


def test_redirects_across_ranks_are_taken(ranks, cut_models):
    """On GPUs nothing stands in for CUDA."""
    taken = ranks.run(
        "redirects_taken", 2, folder=cut_models["qwen3_moe"], batch=make_batch(), megatron=TENSOR | SEQUENCE
    )[0]
    wanted = {redirect.name for redirect in compat.REDIRECTS if redirect.across_ranks and not ranks.on_gpus}
    assert wanted <= set(taken)


@pytest.mark.parametrize(("n", "megatron"), [(2, {}), (2, SHARED_STATE), (4, TENSOR | PIPELINE)])
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(ranks, cut_models, n, megatron):
    found = ranks.run("bad_gradients", n, folder=cut_models["qwen3"], batch=make_batch(), megatron=megatron)
    for metrics, untouched, error in found:
        assert metrics["train/skipped_steps"] == 1
        assert "train/grad_norm" not in metrics
        assert untouched
        assert "4 optimizer steps in a row were skipped; max_skipped_steps is 3" in error


@pytest.mark.parametrize(
    ("megatron", "message"),
    [
        (
            {"context_parallel_size": 3},
            "megatron.context_parallel_size: found 3 and 2 processes; wanted a divisor of 2; ",
        ),
        (
            TENSOR | SEQUENCE | EXPERT,
            "megatron.expert_tensor_parallel_size x megatron.expert_model_parallel_size: found 2 x 2 = 4 and "
            "2 processes; wanted a divisor of 2; ",
        ),
    ],
)
def test_sizes_that_do_not_divide_the_processes_are_refused(ranks, cut_models, megatron, message):
    errors = ranks.run("refusal", 2, folder=cut_models["qwen3_moe"], megatron=megatron)
    assert [error.startswith(message) for error in errors] == [True] * 2


def test_a_size_of_buckets_is_refused_where_megatron_has_one(ranks, cut_models):
    flags = {"ddp_bucket_size": "9", "overlap_grad_reduce": False}
    errors = ranks.run("refusal", 2, folder=cut_models["qwen3"], megatron={"megatron_args": flags})
    assert ["--ddp-bucket-size 9: found it without --overlap-grad-reduce" in error for error in errors] == [
        True
    ] * 2
