"""Reference and teacher without the policy: what they compute apart is what they compute as weights of the policy's model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from slime_core.errors import CheckpointError, TrainerError
from slime_megatron.settings.section import MegatronSection
from slime_megatron.settings.section_roles import LoraSection, RolesSection
from slime_megatron.settings.user_hooks import MegatronHooks

from ..algorithms import policy_gradient
from ..batches import hf_log_probs, make_batch
from ..comparison import near
from ..layouts import LAYOUTS, settings_of

APART = {"apart": frozenset({"ref"})}


def distilling():
    """A policy gradient with penalties for leaving the reference and the teacher, and their log-probs as metrics."""
    inner = policy_gradient("old_log_probs", "ref_log_probs", "teacher_log_probs", "entropy")

    def loss(view, advantages):
        value, metrics = inner.loss(view, advantages)
        found = {
            name: view.reduce((view.log_probs - getattr(view, f"{name}_log_probs")).square())
            for name in ("ref", "teacher")
        }
        total = value + 0.1 * found["ref"] + 0.2 * found["teacher"]
        return total, metrics | {name: each.detach() for name, each in found.items()}

    return replace(inner, loss=loss)


def metrics_of(metrics):
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("has_reference", [True, False])
def test_policy_and_models_apart_learn_what_they_learn_together(
    make_learner, other, tmp_path, has_reference, bf16
):
    settings = {"ref_path": other[1] if has_reference else None, "teacher_path": other[1]}
    flags = {"lr": 1e-2, "bf16": bf16, "max_tokens_per_gpu": 40}
    batches = [make_batch(seed=0, n_steps=2), replace(make_batch(seed=1, n_steps=2), step=2)]
    learner = make_learner(distilling(), settings=settings, **flags)
    together = [learner.train(batch) for batch in batches]
    assert len({together[1][f"train/{name}"] for name in ("ref", "teacher")}) == 2 - has_reference
    apart, folder = settings | APART, None
    for number, batch in enumerate(batches):
        # There is one world in a process, so they take turns.
        learner = make_learner(distilling(), settings=apart, role="ref", **flags)
        if folder is not None:
            learner.load(folder)
        columns = learner.begin(batch)
        assert {name: column.dtype for name, column in columns.items()} == {
            "ref_log_probs": np.float32,
            "teacher_log_probs": np.float32,
        }
        times = learner.learn({})
        learner.save(folder or tmp_path)
        learner = make_learner(distilling(), settings=apart, **flags)
        if folder is not None:
            learner.load(folder)
        assert list(learner._weight_sets) == []
        learner.begin(batch)
        learner.credit(columns)
        found = learner.learn({})
        assert metrics_of(found) == metrics_of(together[number])
        assert sorted(times) == ["perf/ref_log_probs_time", "perf/teacher_log_probs_time"]
        assert not times.keys() & found.keys() and found["perf/pools_wait_time"] >= 0
        folder = tmp_path / str(number)
        learner.save(folder)
    learner = make_learner(
        distilling(), settings=settings, **flags
    )  # goes on with the models among the policy's
    learner.load(tmp_path / "0")
    assert metrics_of(learner.train(batches[1])) == metrics_of(together[1])


def drawn_from_few(batch):
    """The batch, whose tokens were each drawn from six ids."""
    draw, given = np.random.default_rng(1), []
    for i, n in enumerate(batch.response_lengths.tolist()):
        targets = batch.tokens[batch.offsets[i + 1] - n : batch.offsets[i + 1]]
        ids = np.concatenate([targets[:, None], draw.integers(0, 250, (n, 5))], axis=1)
        given.append((ids.flatten(), np.arange(n + 1) * 6))
    return replace(batch, extra={"rollout_top_p_tokens": given})


def routed(batch):
    """The batch, and the two of four experts that the engine sent each token to, in each of two layers."""
    draw = np.random.default_rng(0)
    routes = [draw.random((int(n) - 1, 2, 4)).argsort(-1)[..., :2].astype(np.int32) for n in batch.lengths]
    return replace(batch, extra={"rollout_routed_experts": routes})


@pytest.mark.parametrize("case", ["few ids", "routes of the engine", "MTP layers", "adapters"])
def test_what_is_special_of_the_policy_leaves_the_frozen_models_as_they_are(
    make_learner, qwen3, cut_models, mtp_model, case
):
    folder, make, megatron, settings = {
        "few ids": (qwen3[1], drawn_from_few, {}, {"restricted": True}),
        "routes of the engine": (cut_models["qwen3_moe"], routed, {"use_rollout_routing_replay": True}, {}),
        "MTP layers": (mtp_model[1], lambda batch: batch, {"enable_mtp_training": True}, {}),
        "adapters": (qwen3[1], lambda batch: batch, {}, {"lora": LoraSection(rank=4)}),
    }[case]
    batch, settings = make(make_batch()), settings | {"teacher_path": folder}
    common = {"folder": folder, "megatron": MegatronSection(**megatron), "max_tokens_per_gpu": 40}
    together = make_learner(distilling(), settings=settings, **common).train(batch)
    columns = make_learner(distilling(), settings=settings | APART, role="ref", **common).begin(batch)
    learner = make_learner(distilling(), settings=settings | APART, **common)
    learner.begin(batch)
    learner.credit(columns)
    assert metrics_of(learner.learn({})) == metrics_of(together)


def test_only_what_is_read_is_held_and_nothing_of_it_has_a_gradient(make_learner, other):
    settings = APART | {"teacher_path": other[1]}
    learner = make_learner(policy_gradient("teacher_log_probs"), settings=settings, role="ref")
    batch = make_batch()
    (column,) = learner.begin(batch).values()
    wanted = hf_log_probs(other[0], batch).detach()
    torch.testing.assert_close(torch.from_numpy(column), wanted, rtol=0, atol=near(1e-5))
    (model,) = learner._models.values()
    assert not any(p.requires_grad or hasattr(p, "main_grad") for p in model.parameters())


def test_the_hook_before_log_probs_sees_each_model(make_learner, other):
    seen = []
    hooks = MegatronHooks(before_log_prob=lambda model, role: seen.append((role, model)))
    settings = APART | {"teacher_path": other[1], "hooks": hooks}
    learner = make_learner(distilling(), settings=settings, role="ref")
    learner.begin(make_batch())
    assert [role for role, _ in seen] == ["ref", "teacher"]
    assert [model for _, model in seen] == list(learner._models.values())


def test_a_teacher_of_another_architecture_is_refused_by_the_field(make_learner, make_hf):
    _, folder = make_hf("qwen3", head_dim=32, num_hidden_layers=2)
    with pytest.raises(CheckpointError, match=r"teacher .*num_layers is 2, the policy's is 3"):
        make_learner(distilling(), settings=APART | {"teacher_path": folder}, role="ref")


def test_a_run_whose_reference_has_changed_does_not_go_on_with_another(make_learner, tmp_path):
    algorithm = policy_gradient("ref_log_probs")
    learner = make_learner(algorithm, settings={"roles": RolesSection(ref_update_interval=1)})
    learner.train(make_batch())
    learner.save(tmp_path)
    learner = make_learner(algorithm, settings=APART, role="ref")
    with pytest.raises(CheckpointError, match="found a reference that --ref-update-interval has changed"):
        learner.load(tmp_path)
    learner = make_learner(algorithm, settings=APART)
    learner.load(tmp_path)
    assert list(learner._weight_sets) == []


def test_steps_are_begun_before_they_are_credited(make_learner):
    learner = make_learner(policy_gradient("ref_log_probs"), settings=APART)
    with pytest.raises(TrainerError, match=r"no step has begun; call begin\(\) first"):
        learner.credit({})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3", "deepseek_v3"])
def test_log_probs_do_not_depend_on_the_layout(ranks, cut_models, kind):
    common = {"folder": cut_models[kind], "batch": make_batch()}
    (wanted,) = ranks.run("frozen_log_probs", 1, megatron={}, **common)
    for layout in LAYOUTS:
        if (settings := settings_of(kind, layout)) is None:
            continue
        n, megatron = settings
        for found in ranks.run("frozen_log_probs", n, megatron=megatron, **common):
            for name in ("ref_log_probs", "teacher_log_probs"):
                np.testing.assert_allclose(found[name], wanted[name], rtol=0, atol=2e-5, err_msg=layout)
