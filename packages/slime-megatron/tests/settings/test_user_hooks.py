"""A user's own functions inside the trainer: when they are called, and with what."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from slime_core.errors import PluginError, TrainerError
from slime_core.plugins.registry import Registry
from slime_core.samples import VersionSpans
from slime_megatron.settings.section import MegatronSection
from slime_megatron.settings.section_roles import RolesSection
from slime_megatron.settings.user_hooks import MegatronHooks, resolve_hooks

from ..batches import make_batch
from ..views import recording


def test_each_function_is_called_in_its_place(make_learner):
    calls = []
    hooks = MegatronHooks(
        init=lambda settings: calls.append(("init", torch.distributed.is_initialized(), settings.seed)),
        before_log_prob=lambda model, role: calls.append(
            (role, model.embedding.word_embeddings.weight.sum())
        ),
        before_train_step=lambda step, number, model, optimizer, scheduler: calls.append(
            ("step", step, number, scheduler.num_steps)
        ),
    )
    algorithm, _ = recording("ref_log_probs")
    learner = make_learner(algorithm, lr=1e-2, settings={"hooks": hooks})
    assert calls == [("init", True, 1)]
    learner.train(make_batch(n_steps=2))
    names = [call[0] for call in calls[1:]]
    assert names == ["actor", "ref", "step", "step"]
    assert calls[3:] == [("step", 1, 0, 0), ("step", 1, 1, 1)]
    learner.train(make_batch())  # one step: its own log-probs are the old ones
    assert [call[0] for call in calls[5:]] == ["ref", "step"]
    assert calls[5][1] == calls[2][1]  # the reference's weights were in the model, not the policy's
    assert calls[2][1] != learner.model.embedding.word_embeddings.weight.sum()


#: The nine response tokens of a sample, by the weights that were sent first.
SENT_FIRST = VersionSpans(versions=np.array([0]), offsets=np.array([0, 9]))


def test_earlier_policies_are_called_old_actor(make_learner):
    roles = []
    hooks = MegatronHooks(before_log_prob=lambda model, role: roles.append(role))
    settings = {"hooks": hooks, "roles": RolesSection(keep_old_actor=True)}
    learner = make_learner(settings=settings)
    learner.mark_sent("0")
    learner.train(replace(make_batch(lengths=((5, 9),)), weight_versions=SENT_FIRST))
    assert roles == ["old_actor"]


def test_a_model_provider_builds_the_model(make_learner):
    from slime_megatron.model.gpt import provide_model

    def frozen_embedding(config, architecture, *, pre_process, post_process):
        model = provide_model(config, architecture, pre_process=pre_process, post_process=post_process)
        model.embedding.word_embeddings.weight.requires_grad = False
        return model

    learner = make_learner(settings={"hooks": MegatronHooks(model_provider=frozen_embedding)})
    before = learner.model.embedding.word_embeddings.weight.detach().clone()
    learner.train(make_batch())
    assert torch.equal(before, learner.model.embedding.word_embeddings.weight)


def test_a_model_with_other_routers_is_refused_where_they_would_do_otherwise(make_learner, cut_models):
    from megatron.core.transformer.moe.router import TopKRouter
    from slime_megatron.model.gpt import provide_model

    def with_megatrons_own(config, architecture, **stage):
        model = provide_model(config, architecture, **stage)
        model.decoder.layers[1].mlp.router.__class__ = TopKRouter
        return model

    common = {
        "folder": cut_models["qwen3_moe"],
        "settings": {"hooks": MegatronHooks(model_provider=with_megatrons_own)},
    }
    make_learner(**common).train(make_batch())
    for asked in ({"use_routing_replay": True}, {"megatron_args": {"moe_z_loss_coeff": "0.1"}}):
        with pytest.raises(
            TrainerError, match=r"custom_model_provider_path: the model has routers of .*TopKRouter"
        ):
            make_learner(**common, megatron=MegatronSection(**asked))


def test_a_reference_that_is_no_function_is_refused():
    from slime_megatron.model.gpt import provide_model

    hooks = resolve_hooks(
        Registry(), None, model_provider="slime_megatron.model.gpt:provide_model", init=None
    )
    assert hooks == MegatronHooks(model_provider=provide_model)
    with pytest.raises(PluginError, match="which is str; wanted a function"):
        resolve_hooks(Registry(), None, before_log_prob="slime_megatron.settings.user_hooks:GROUP")
