"""The critic: its values, its own steps beside the policy's, critic-only steps, and resuming it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from slime_core.config.load import load_settings
from slime_core.errors import CheckpointError
from slime_core.plugins.registry import Registry
from slime_core.run.assemble import Algorithm, algorithm
from slime_megatron.checkpoint.convert import to_hf
from slime_megatron.checkpoint.role_checks import role_problems
from slime_megatron.settings.section_roles import RolesSection
from slime_models.hf.config import read_config
from slime_models.hf.folder import HfCheckpoint

from ..algorithms import policy_gradient
from ..batches import make_batch
from ..comparison import near
from ..host_copies import on_host
from ..tiny_models import FAMILIES


def actor_critic(seen=None):
    """Advantages are return less value, the return of every token the sample's reward; values by squared error."""

    def estimator(view):
        if seen is not None:
            seen.append(on_host(view))
        returns = view.rewards[view.sample_of_token]
        return returns - view.values, returns

    def value_loss(view, returns):
        assert not view.values.requires_grad and view.log_probs is None
        value = view.reduce((view.new_values - returns).square())
        return value, {"value_loss": value.detach()}

    return Algorithm(estimator, policy_gradient().loss, frozenset({"values"}), "raw", value_loss)


def hidden_states(model, batch):
    """Return transformers' final hidden state [T, hidden] before each response token, with gradient."""
    found = []
    for i in range(len(batch)):
        tokens = torch.from_numpy(batch.tokens[batch.offsets[i] : batch.offsets[i + 1]].astype(np.int64))
        hidden = model.model(tokens[None]).last_hidden_state[0]
        found.append(hidden[len(tokens) - 1 - int(batch.response_lengths[i]) : -1])
    return torch.cat(found)


@pytest.fixture(scope="module")
def scored(qwen3, tmp_path_factory):
    """The tiny model's folder with a value head, as transformers' classifiers name it, and the head."""
    folder = tmp_path_factory.mktemp("scored")
    head = torch.randn(1, 64, generator=torch.Generator().manual_seed(3)) * 0.1
    for path in qwen3[1].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    save_file(
        load_file(qwen3[1] / "model.safetensors") | {"score.weight": head},
        folder / "model.safetensors",
        metadata={"format": "pt"},
    )
    return folder, head


def test_values_are_the_head_over_the_state_before_each_token(make_learner, qwen3, scored):
    batch, seen = make_batch(), []
    folder, head = scored
    make_learner(actor_critic(seen), max_tokens_per_gpu=40, settings={"critic_path": folder}).train(batch)
    wanted = (hidden_states(qwen3[0], batch) @ head.t()).squeeze(1).detach()
    torch.testing.assert_close(seen[0].values, wanted, rtol=0, atol=near(1e-5))


def test_a_critic_without_a_head_begins_at_zero_and_its_first_gradient_is_autograds(make_learner, qwen3):
    batch, seen = make_batch(), []
    learner = make_learner(actor_critic(seen), max_tokens_per_gpu=40)
    metrics = learner.train(batch)
    assert (seen[0].values == 0).all()
    rewards = torch.from_numpy(np.repeat(batch.rewards, batch.response_lengths))
    weights = torch.from_numpy(batch.weights)
    head = torch.zeros(1, 64, requires_grad=True)
    values = (hidden_states(qwen3[0], batch).detach() @ head.t()).squeeze(1)
    loss = (weights * (values - rewards).square()).sum()
    loss.backward()
    critic = learner._critic.trained.model.module
    gradient = on_host(critic.output_layer.weight.main_grad)
    torch.testing.assert_close(gradient, head.grad, rtol=near(1e-5), atol=near(1e-6))
    assert metrics["train/critic/value_loss"] == pytest.approx(loss.item(), rel=near(1e-5))
    assert metrics["train/critic/grad_norm"] == pytest.approx(head.grad.norm().item(), rel=near(1e-5))
    assert metrics["train/critic/skipped_steps"] == 0


@pytest.mark.parametrize("tied", [True, False])
def test_a_critic_starts_from_a_runs_critic_and_neither_a_policy_nor_a_folder_does(
    make_learner, make_hf, tmp_path, tied
):
    _, folder = make_hf("qwen3", head_dim=32, tie_word_embeddings=tied)
    learner, batch, seen = make_learner(actor_critic(), folder=folder, lr=1e-2), make_batch(), []
    learner.train(batch)
    learner.save(tmp_path / "run")
    learner = make_learner(
        actor_critic(seen), folder=folder, lr=0.0, settings={"critic_path": tmp_path / "run/critic"}
    )
    learner.train(batch)
    learner.load(tmp_path / "run")
    learner.train(batch)
    assert seen[0].values.abs().max() > 0
    assert torch.equal(seen[0].values, seen[1].values)
    family = FAMILIES["qwen3"]
    roles = RolesSection(actor_load=str(tmp_path / "run/critic"), critic_load=str(tmp_path / "run/critic"))
    (problem,) = role_problems(roles, family, family.architecture(read_config(folder)))
    assert (problem.where, problem.found) == ("roles.actor_load", f"{tmp_path}/run/critic, which is a critic")
    with pytest.raises(CheckpointError, match="run/critic: is a critic, whose head would be lost"):
        to_hf(
            tmp_path / "run/critic",
            tmp_path / "hf",
            Registry.from_environment(),
            config_from=folder,
            max_file_bytes=10**9,
        )
    assert not (tmp_path / "hf").exists()


def test_without_a_folder_of_its_own_the_critic_begins_as_the_policy_does(make_learner, qwen3, tmp_path):
    learner = make_learner(lr=1e-2)
    learner.train(make_batch())
    learner.save_hf(tmp_path / "sft")
    wanted = HfCheckpoint(tmp_path / "sft")["model.norm.weight"]
    learner = make_learner(actor_critic(), settings={"actor_path": tmp_path / "sft"})
    found = learner._critic.trained.model.module.decoder.final_layernorm.weight.detach()
    assert torch.equal(on_host(found), wanted)
    assert not torch.equal(wanted, HfCheckpoint(qwen3[1])["model.norm.weight"])


def test_the_critic_learns_the_returns_and_the_policy_gets_less_to_learn(make_learner):
    batch, seen = make_batch(), []
    learner = make_learner(actor_critic(seen), lr=0.0, settings={"roles": RolesSection(critic_lr=3e-3)})
    losses = [learner.train(batch)["train/critic/value_loss"] for _ in range(20)]
    assert losses[-1] < losses[0] / 4
    trained = seen[0].loss_mask > 0
    returns = seen[0].rewards[seen[0].sample_of_token]
    errors = [(view.values - returns)[trained].abs().mean() for view in (seen[0], seen[-1])]
    assert errors[1] < errors[0] / 2


def test_only_the_critic_moves_in_the_first_steps(make_learner):
    learner = make_learner(
        actor_critic(), lr=1e-2, settings={"roles": RolesSection(num_critic_only_steps=1, critic_lr=1e-3)}
    )
    before = [p.detach().clone() for p in learner.model.parameters()]
    metrics = learner.train(make_batch())
    assert all(torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True))
    assert metrics["train/critic/lr"] == 1e-3
    assert "train/loss" not in metrics
    assert metrics["train/train_rollout_logprob_abs_diff"] > 0  # still held against the engine
    metrics = learner.train(replace(make_batch(), step=2))
    assert any(not torch.equal(a, b) for a, b in zip(before, learner.model.parameters(), strict=True))
    assert metrics["train/lr"] == 1e-2


@pytest.mark.parametrize("bf16", [False, True])
def test_resuming_with_a_critic_equals_never_having_stopped(make_learner, tmp_path, bf16):
    def weights(learner):
        models = (learner.model, learner._critic.trained.model.module)
        return [p.detach().clone() for model in models for p in model.parameters()]

    learner = make_learner(actor_critic(), bf16=bf16, lr=1e-2)
    learner.train(make_batch(seed=0, n_steps=2))
    learner.save(tmp_path)
    unbroken = learner.train(make_batch(seed=1, n_steps=2))
    wanted = weights(learner)
    learner = make_learner(actor_critic(), bf16=bf16, lr=1e-2)
    learner.train(make_batch(seed=9))
    learner.load(tmp_path)
    resumed = learner.train(make_batch(seed=1, n_steps=2))
    assert all(torch.equal(a, b) for a, b in zip(weights(learner), wanted, strict=True))
    for name in ("train/loss", "train/critic/loss", "train/critic/grad_norm"):
        assert unbroken[name] == resumed[name]


def test_a_checkpoint_without_a_critic_is_refused(make_learner, tmp_path):
    make_learner().save(tmp_path)
    with pytest.raises(CheckpointError, match=r"critic: has no trainer\.json"):
        make_learner(actor_critic()).load(tmp_path)


def test_what_the_critics_loss_reads_is_filled(tmp_path, monkeypatch):
    (tmp_path / "fresh_values.py").write_text(
        "def loss(view, returns):\n    ...\n\n\nloss.needs = lambda options: frozenset({'values', 'new_values', 'staleness'})\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    given = ["--hf-checkpoint", "x", "--rollout-batch-size", "2", "--rollout-max-response-len", "8"]
    given += ["--advantage-estimator", "ppo", "--value-loss-type", "fresh_values:loss"]
    registry = Registry.from_environment()
    needs = algorithm(load_settings([], given, registry=registry), registry).needs
    assert {"staleness", "values"} <= needs
    assert "new_values" not in needs
