"""MTP layers: against transformers' layers put together by hand, and against the policy trained alone."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from slime_core.config.build import BuildContext
from slime_core.config.load import load_settings
from slime_core.errors import CheckpointError, TrainerError
from slime_core.plugins.registry import Registry
from slime_megatron import hooks
from slime_megatron.checkpoint.convert import to_hf, to_megatron
from slime_megatron.checkpoint.finding import find
from slime_megatron.settings.section import MegatronSection
from slime_models.hf.folder import HfCheckpoint, save_hf

from ..batches import make_batch
from ..comparison import near, sent
from ..tiny_models import DEEPSEEK, INDEXER

#: Families of latent attention -> fields of config.json; an indexer chooses 6 of up to 19 tokens.
LATENT = {
    "deepseek_v3": DEEPSEEK,
    "kimi_k2": DEEPSEEK | {"n_group": 1, "topk_group": 1},
    "glm4_moe_lite": DEEPSEEK
    | {"n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "deepseek_v32": DEEPSEEK | INDEXER,
    "glm_moe_dsa": DEEPSEEK | INDEXER | {"n_group": 1, "topk_group": 1},
}
ON = {"enable_mtp_training": True}
MTP_LAYER = ("model.layers.2.", "model.layers.3.")
NAMES = ("enorm", "hnorm", "eh_proj", "shared_head.norm")
COPIES = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}


def shared_prompts():
    """Return samples of which two and three share a prompt; prompts of one and two tokens, and a response of one."""
    lengths = ((5, 9), (5, 3), (1, 6), (7, 12), (7, 1), (7, 5), (2, 7), (2, 4))
    batch = make_batch(lengths=lengths, temperature=0.8)
    tokens = batch.tokens.copy()
    for i, first in ((1, 0), (4, 3), (5, 3), (7, 6)):
        start, n = batch.offsets[first], lengths[i][0]
        tokens[batch.offsets[i] : batch.offsets[i] + n] = tokens[start : start + n]
    return replace(batch, tokens=tokens, group_ids=np.array([0, 0, 1, 2, 2, 2, 3, 3]))


def reference(model, weights, batch):
    """Return [2, T] of log-probs of the response tokens at both depths, sample by sample, 0 where there is none.

    The equations of arXiv 2412.19437, section 2.2, with transformers' decoder layers; embeddings in the first half of the
    columns of `eh_proj`, as SGLang's `glm4_moe_nextn.py` has them; hidden states from after the last norm.
    """
    inner, head = model.model, model.lm_head.weight.detach()

    def norm(x, name):
        return torch.rms_norm(x, x.shape[-1:], weights[name], eps=model.config.rms_norm_eps)

    columns = [[], []]
    for i in range(len(batch)):
        ids = torch.from_numpy(batch.tokens[batch.offsets[i] : batch.offsets[i + 1]].astype(np.int64))
        n, n_prompt = len(ids), len(ids) - int(batch.response_lengths[i])
        with torch.no_grad():
            embedded = inner.embed_tokens(ids)[None]
            angles = inner.rotary_emb(embedded, torch.arange(n)[None])
            hidden = embedded
            for layer in inner.layers[:2]:
                hidden = through(layer, hidden, angles)
            hidden = inner.norm(hidden)
        for depth in (1, 2):
            used = n - 1 - depth
            if used < 1:
                columns[depth - 1].append(torch.zeros(n - n_prompt))
                continue
            prefix = MTP_LAYER[depth - 1]
            pair = [
                norm(embedded[:, depth : depth + used], f"{prefix}enorm.weight"),
                norm(hidden[:, :used], f"{prefix}hnorm.weight"),
            ]
            x = torch.cat(pair, dim=-1) @ weights[f"{prefix}eh_proj.weight"].t()
            turned = tuple(each[:, :used] for each in angles)
            x = through(inner.layers[1 + depth], x, turned)
            hidden = norm(x, f"{prefix}shared_head.norm.weight")
            log_probs = torch.log_softmax(hidden[0] @ head.t() / batch.temperature, dim=-1)
            log_probs = log_probs.gather(1, ids[depth + 1 :, None]).squeeze(1)
            part = log_probs[n_prompt - depth - 1 :] if n_prompt > depth else torch.zeros(n - n_prompt)
            columns[depth - 1].append(part)
    return torch.stack([torch.cat(column) for column in columns])


def through(layer, hidden, angles):
    """Return what a layer of transformers makes of hidden states: those with an indexer want the places of tokens and a mask, and
    GLM-5's return what was chosen besides."""
    if not hasattr(layer.self_attn, "indexer"):
        return layer(hidden, attention_mask=None, position_embeddings=angles)
    n = hidden.shape[1]
    never = torch.full((n, n), torch.finfo(hidden.dtype).min).triu(1)[None, None]
    found = layer(
        hidden, attention_mask=never, position_ids=torch.arange(n)[None], position_embeddings=angles
    )
    return found[0] if isinstance(found, tuple) else found


def section(**changes):
    return MegatronSection(**ON | changes)


def mtp_gradients(learner):
    return {
        name: parameter.main_grad.to("cpu", copy=True)
        for name, parameter in learner.model.named_parameters()
        if name.startswith("mtp.") and parameter.requires_grad
    }


@pytest.mark.proves("{family}", "mtp")
@pytest.mark.parametrize("family", ["glm4_moe", *LATENT])
def test_losses_and_gradients_are_those_of_the_equations(make_learner, make_mtp_model, family, request):
    if family in LATENT:
        model, folder = make_mtp_model("deepseek_v3" if family == "kimi_k2" else family, **LATENT[family])
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"model_type": family}))
    else:
        model, folder = request.getfixturevalue("mtp_model")
    batch = shared_prompts()
    weights = {
        name: tensor.clone().requires_grad_()
        for name, tensor in HfCheckpoint(folder).items()
        if name.startswith(MTP_LAYER) and any(f".{part}." in name for part in NAMES)
    }
    log_probs = reference(model, weights, batch)
    losses = -(log_probs @ torch.from_numpy(batch.weights))
    (0.3 * losses.mean()).backward()
    learner = make_learner(
        folder=folder, megatron=section(mtp_loss_scaling_factor=0.3), max_tokens_per_gpu=24
    )
    metrics = learner.train(batch)
    for depth, loss in enumerate(losses.tolist(), start=1):
        assert metrics[f"train/mtp_{depth}_loss"] == pytest.approx(loss, rel=near(1e-5))
    assert metrics["train/mtp_loss"] == pytest.approx(losses.mean().item(), rel=near(1e-5))
    found = mtp_gradients(learner)
    for depth, layer in enumerate(model.model.layers[2:]):
        prefix, own = MTP_LAYER[depth], f"mtp.layers.{depth}."
        wanted = {
            own + ("final_layernorm" if part == "shared_head.norm" else part): weights[
                f"{prefix}{part}.weight"
            ].grad
            for part in NAMES
        }
        wanted[f"{own}mtp_model_layer.self_attention.linear_proj"] = layer.self_attn.o_proj.weight.grad
        wanted[f"{own}mtp_model_layer.mlp.router"] = layer.mlp.gate.weight.grad
        for name, gradient in wanted.items():
            assert (found[f"{name}.weight"] - gradient).abs().max() <= near(2e-5) * gradient.abs().max(), name


def test_the_policy_learns_as_if_there_were_none(make_learner, mtp_model):
    """Bit for bit, where both gradients are clipped, and the policy's norm is its own."""
    seen = []
    for megatron in (section(), MegatronSection()):
        learner = make_learner(folder=mtp_model[1], megatron=megatron, clip_grad=0.01, lr=1e-2)
        metrics = [learner.train(make_batch(seed=seed)) for seed in range(3)]
        gradients = {
            name: parameter.main_grad.clone()
            for name, parameter in learner.model.named_parameters()
            if not name.startswith("mtp.")
        }
        seen.append((metrics, gradients, sent(learner)))
    (of_mtp, *with_mtp), (alone, *without) = seen
    for found, wanted in zip(with_mtp, without, strict=True):
        assert found.keys() == wanted.keys()
        assert all(found[name].equal(tensor) for name, tensor in wanted.items())
    for one, other in zip(of_mtp, alone, strict=True):
        names = [name for name in other if name.startswith("train/")]
        assert {name: one[name] for name in names} == {name: other[name] for name in names}
        assert set(one) - set(other) == {"train/mtp_loss", "train/mtp_1_loss", "train/mtp_2_loss"}
        assert other["train/grad_norm"] > 0.1


def test_nothing_depends_on_how_a_batch_is_cut(make_learner, mtp_model):
    cuts = [
        (1000, {}),
        (24, {}),
        (12, {"share_prefix": False}),
        (24, {"recompute_granularity": "full"}),
        (1000, {"log_probs_chunk_size": 7}),
    ]
    flags = {"megatron_args": {"moe_z_loss_coeff": "1e-2", "moe_router_load_balancing_type": "seq_aux_loss",
                               "moe_aux_loss_coeff": "1e-2"}}  # fmt: skip
    found = []
    for max_tokens, changes in cuts:
        learner = make_learner(
            folder=mtp_model[1], megatron=section(**flags | changes), max_tokens_per_gpu=max_tokens
        )
        metrics = learner.train(shared_prompts())
        found.append((metrics, mtp_gradients(learner)))
    first, gradients = found[0]
    for metrics, others in found[1:]:
        for name in ("train/mtp_1_loss", "train/mtp_2_loss", "train/z_loss", "train/seq_load_balancing_loss"):
            assert metrics[name] == pytest.approx(first[name], rel=1e-6)
        for name, gradient in gradients.items():
            assert (others[name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


def test_loss_falls_and_the_policy_stays_where_these_layers_alone_are_trained(make_learner, mtp_model):
    megatron = section(only_train_params_name_list=[r"^mtp\."])
    learner = make_learner(folder=mtp_model[1], megatron=megatron, lr=1e-2)
    batch = make_batch()
    losses = [learner.train(batch)["train/mtp_loss"] for _ in range(8)]
    assert losses[-1] < 0.5 * losses[0]
    before = HfCheckpoint(mtp_model[1])
    assert all(tensor.equal(before[name]) for name, tensor in sent(learner).items())


def test_no_prompt_is_long_enough(make_learner, mtp_model):
    """Nothing is predicted, and nothing breaks."""
    batch = make_batch(lengths=((1, 5), (1, 3)))
    flags = {"moe_aux_loss_coeff": "1e-2", "moe_router_load_balancing_type": "seq_aux_loss"}
    learner = make_learner(folder=mtp_model[1], megatron=section(megatron_args=flags))
    metrics = learner.train(batch)
    assert metrics["train/mtp_loss"] == 0.0
    assert all(not gradient.any() for gradient in mtp_gradients(learner).values())


def folder_tensors(folder):
    return {name: tensor.clone() for name, tensor in HfCheckpoint(folder).items()}


def equal(found, wanted):
    return found.keys() == wanted.keys() and all(found[name].equal(wanted[name]) for name in wanted)


def test_weights_go_into_folders_and_checkpoints_and_not_to_engines(make_learner, mtp_model, tmp_path):
    _, folder = mtp_model
    registry, before = Registry.from_environment(), folder_tensors(folder)
    learner = make_learner(folder=folder, megatron=section(), lr=1e-2)
    learner.save_hf(tmp_path / "untrained")
    assert equal(folder_tensors(tmp_path / "untrained"), before)
    learner.train(make_batch())
    assert sent(learner).keys() == {name for name in before if not name.startswith(MTP_LAYER)}
    learner.save(tmp_path / "checkpoint")
    learner.save_hf(tmp_path / "hf")
    trained = folder_tensors(tmp_path / "hf")
    moved = {name for name in trained if not trained[name].equal(before[name])}
    frozen = {name for name in trained if name.endswith("e_score_correction_bias")}
    assert moved == trained.keys() - frozen
    for prefix in MTP_LAYER:
        for copy, original in COPIES.items():
            assert trained[f"{prefix}{copy}.weight"].equal(trained[f"{original}.weight"])
    to_hf(
        tmp_path / "checkpoint",
        tmp_path / "converted",
        registry,
        config_from=folder,
        max_file_bytes=10**9,
    )
    assert equal(folder_tensors(tmp_path / "converted"), trained)


def test_a_resumed_run_goes_on_bit_for_bit(make_learner, mtp_model, tmp_path):
    batches = [make_batch(seed=seed) for seed in range(3)]
    learner = make_learner(folder=mtp_model[1], megatron=section(), lr=1e-2)
    learner.train(batches[0])
    learner.train(batches[1])
    learner.save(tmp_path / "checkpoint")
    wanted = learner.train(batches[2])
    learner.save_hf(tmp_path / "one")
    again = make_learner(folder=mtp_model[1], megatron=section(), lr=1e-2)
    again.load(tmp_path / "checkpoint")
    found = again.train(batches[2])
    again.save_hf(tmp_path / "other")
    assert {n: v for n, v in found.items() if n.startswith("train/")} == {
        n: v for n, v in wanted.items() if n.startswith("train/")
    }
    assert equal(folder_tensors(tmp_path / "other"), folder_tensors(tmp_path / "one"))
    without = make_learner(folder=mtp_model[1])
    with pytest.raises(CheckpointError, match=r"architecture\.holds_mtp is True"):
        without.load(tmp_path / "checkpoint")


def test_megatrons_folder_holds_the_layers_and_restores_them(make_learner, mtp_model, tmp_path):
    from megatron.core import dist_checkpointing, parallel_state

    registry, before = Registry.from_environment(), folder_tensors(mtp_model[1])
    to_megatron(mtp_model[1], tmp_path / "megatron", registry)
    source = find(tmp_path / "megatron").weights
    to_hf(source, tmp_path / "hf", registry, config_from=tmp_path / "megatron/hf", max_file_bytes=40_000)
    assert equal(folder_tensors(tmp_path / "hf"), before)
    model = make_learner(folder=mtp_model[1], megatron=section()).model
    wanted = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    state = model.sharded_state_dict(metadata={"dp_cp_group": group})
    model.load_state_dict(dist_checkpointing.load({"model": state}, str(source))["model"])
    assert equal(dict(model.named_parameters()), wanted)


def problems_of(*flags):
    needed = ["--hf-checkpoint", "x", "--rollout-batch-size", "2", "--rollout-max-response-len", "8"]
    settings = load_settings([], [*needed, *flags], registry=Registry())
    return [str(problem) for problem in hooks.slime_check_config(settings, Registry())]


def test_adapters_beside_these_layers_are_refused():
    (problem,) = problems_of("--lora-rank", "4", "--enable-mtp-training")
    assert problem.startswith("megatron.enable_mtp_training: found it beside lora.rank")


def test_a_model_without_such_layers_is_refused(make_learner, mtp_model, cut_models):
    with pytest.raises(TrainerError, match="a qwen3 model whose config gives no num_nextn_predict_layers"):
        make_learner(megatron=section())
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\.eh_proj\.weight.* missing"):
        make_learner(folder=cut_models["glm4_moe"], megatron=section())
    one = {"megatron_args": {"mtp_num_layers": "1"}}
    with pytest.raises(TrainerError, match="mtp_num_layers: found 1; wanted 2, the num_nextn_predict_layers"):
        make_learner(folder=mtp_model[1], megatron=section(**one))
    with pytest.raises(TrainerError, match="mtp_num_layers: found 1 without enable_mtp_training"):
        make_learner(folder=mtp_model[1], megatron=MegatronSection(**one))


def test_the_layers_are_wanted_of_the_folder_that_the_policys_weights_begin_as(mtp_model, tmp_path):
    whole, bare = mtp_model[1], tmp_path / "bare"
    lasting = {n: w for n, w in HfCheckpoint(whole).items() if not n.startswith(MTP_LAYER)}
    save_hf(bare, lasting.items(), config_from=whole)

    def found(folder, *flags):
        flags = (
            "--enable-mtp-training",
            "--rollout-batch-size",
            "2",
            "--rollout-max-response-len",
            "8",
            *flags,
        )
        registry = Registry()
        build = BuildContext(
            settings=load_settings([], ["--hf-checkpoint", str(folder), *flags], registry=registry),
            registry=registry,
            load_tokenizer=lambda: None,
            model_path=folder,
            run_dir=tmp_path,
        )
        return [str(problem) for problem in hooks.slime_check_build(build=build)]

    assert found(whole) == found(bare, "--actor-load", str(whole)) == []
    for problems in (found(bare), found(whole, "--actor-load", str(bare))):
        (problem,) = problems
        assert (
            f"found it with num_nextn_predict_layers 2 in config.json, and the weights of {bare}, which"
            in problem
        )
