"""MiMo, for which transformers has no class: its decoder against Qwen 2's, its MTP layer against a loop over samples.

`modeling_mimo.py` of the model's folder derives the decoder from transformers' Qwen 2, and so do SGLang's `mimo.py` and
`mimo_mtp.py`, from which the names and the order of the MTP layer's halves are taken.
"""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from slime_megatron.settings.section import MegatronSection
from slime_megatron.testing import check_trained_family, random_model
from slime_models.family.families.mimo import MIMO
from slime_models.hf.folder import HfCheckpoint, save_hf
from transformers import AutoConfig, AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from ..batches import make_batch
from ..comparison import near
from ..host_copies import on_host
from ..layouts import PIPELINE, SEQUENCE, TENSOR, largest_difference, with_shared_prompts
from ..tiny_models import VOCAB

MTP = "model.mtp_layers.0."
ON = MegatronSection(enable_mtp_training=True, mtp_loss_scaling_factor=0.3)


class MiMoConfig(Qwen2Config):
    """What the folder's own `configuration_mimo.py` is, as far as the decoder goes."""

    model_type = "mimo"


class MiMoForCausalLM(Qwen2ForCausalLM):
    """The decoder."""

    config_class = MiMoConfig


@pytest.fixture(scope="module")
def mimo(make_hf, tmp_path_factory):
    """Return a Qwen 2 of three layers, and the folder of a MiMo whose MTP layer is built around the third."""
    model, made = make_hf("qwen2", num_hidden_layers=3, vocab_size=VOCAB + 1, tie_word_embeddings=False)
    weights = {name.replace("model.layers.2.", MTP): tensor for name, tensor in HfCheckpoint(made).items()}
    generator = torch.Generator().manual_seed(1)
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        weights[f"{MTP}{name}.weight"] = 1 + 0.15 * torch.randn(64, generator=generator)
    weights[f"{MTP}input_proj.weight"] = 0.15 * torch.randn(64, 128, generator=generator)
    folder = save_hf(tmp_path_factory.mktemp("mimo") / "hf", weights.items(), config_from=made)
    config = json.loads((made / "config.json").read_text())
    config |= {"model_type": "mimo", "num_hidden_layers": 2, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return model, folder


@pytest.mark.proves("mimo", "train", "convert", "lora")
def test_the_decoder_computes_what_qwen_2_does(tmp_path):
    AutoConfig.register("mimo", MiMoConfig)
    AutoModelForCausalLM.register(MiMoConfig, MiMoForCausalLM)
    sizes = {"vocab_size": 251, "hidden_size": 64, "intermediate_size": 112, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    config = {"model_type": "mimo", "rope_theta": 640_000.0, "num_nextn_predict_layers": 0} | sizes | heads
    check_trained_family(MIMO, random_model(config, tmp_path / "hf"))


def reference(model, weights, batch):
    """Return [T] of log-probs of the response tokens but one before, 0 where there is none; `weights` are the MTP layer's own."""
    inner, head, found = model.model, model.lm_head.weight.detach(), []

    def norm(x, name):
        return torch.rms_norm(x, x.shape[-1:], weights[f"{MTP}{name}.weight"], eps=model.config.rms_norm_eps)

    for i in range(len(batch)):
        ids = torch.from_numpy(batch.tokens[batch.offsets[i] : batch.offsets[i + 1]].astype(np.int64))
        n, n_response = len(ids), int(batch.response_lengths[i])
        with torch.no_grad():
            hidden = embedded = inner.embed_tokens(ids)[None]
            angles = inner.rotary_emb(embedded, torch.arange(n)[None])
            for layer in inner.layers[:2]:
                hidden = layer(hidden, attention_mask=None, position_embeddings=angles)
            hidden = inner.norm(hidden)
        pair = (norm(hidden[:, : n - 2], "hidden_layernorm"), norm(embedded[:, 1 : n - 1], "token_layernorm"))
        x = torch.cat(pair, dim=-1) @ weights[f"{MTP}input_proj.weight"].t()
        turned = tuple(each[:, : n - 2] for each in angles)
        x = inner.layers[2](x, attention_mask=None, position_embeddings=turned)
        log_probs = torch.log_softmax(norm(x, "final_layernorm")[0] @ head.t(), dim=-1)
        found.append(log_probs.gather(1, ids[2:, None]).squeeze(1)[-n_response:])
    return torch.cat(found)


@pytest.mark.proves("mimo", "mtp")
def test_loss_and_gradients_of_the_mtp_layer_are_those_of_the_loop(make_learner, mimo):
    model, folder = mimo
    batch = make_batch()
    outer = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
    weights = {
        f"{MTP}{name}.weight": HfCheckpoint(folder)[f"{MTP}{name}.weight"].clone().requires_grad_()
        for name in outer
    }
    loss = -(reference(model, weights, batch) @ torch.from_numpy(batch.weights))
    (0.3 * loss).backward()
    learner = make_learner(folder=folder, megatron=ON, max_tokens_per_gpu=24)
    assert learner.train(batch)["train/mtp_1_loss"] == pytest.approx(loss.item(), rel=near(1e-5))
    gradients = on_host({name: each.main_grad for name, each in learner.model.named_parameters()})
    held = MIMO.architecture(json.loads((folder / "config.json").read_text())).with_mtp()
    found = dict(MIMO.hf_tensors(((n, gradients[n]) for n in MIMO.parameter_names(held)), held))
    wanted = {name: each.grad for name, each in weights.items()} | {
        f"{MTP}{name}": each.grad for name, each in model.model.layers[2].named_parameters()
    }
    assert wanted.keys() == {name for name in found if name.startswith(MTP)}
    for name, gradient in wanted.items():
        assert (found[name] - gradient).abs().max() <= near(1e-5) * gradient.abs().max(), name


def test_the_layer_learns_under_every_layout_and_goes_into_folders(ranks, mimo, make_learner, tmp_path):
    folder, megatron = mimo[1], {"enable_mtp_training": True}
    common = {"folder": folder, "batch": with_shared_prompts(), "train": {"max_tokens_per_gpu": 40}}
    one, gradients, _ = ranks.run("train", 1, megatron=megatron, n_steps=2, **common)[0]
    assert any(name.startswith(MTP) for name in gradients)
    for layout in (TENSOR | SEQUENCE, PIPELINE):
        found = ranks.run("train", 2, megatron=layout | megatron, n_steps=2, **common)[0]
        assert found[0]["train/mtp_1_loss"] == pytest.approx(one["train/mtp_1_loss"], abs=1e-6)
        assert largest_difference(found[1], gradients, relative=True) <= 1e-5
    for section in (ON, MegatronSection()):
        make_learner(folder=folder, megatron=section).save_hf(tmp_path / "hf")
        saved, before = HfCheckpoint(tmp_path / "hf"), HfCheckpoint(folder)
        assert saved.keys() == before.keys()
        assert all(saved[name].equal(before[name]) for name in before)
