"""A critic without the policy: what both compute apart, one after the other, is what a critic among the policy's ranks does."""

from __future__ import annotations

from dataclasses import replace

import pytest
from slime_algos.losses.value import value_loss
from slime_megatron.settings.checks import apart_problems
from slime_megatron.settings.section_roles import RolesSection

from ..batches import make_batch
from .test_critic import actor_critic


@pytest.fixture
def settings():
    """Other fields of `LearnerSettings`: the critic alone is trained in the first step."""
    return {"roles": RolesSection(critic_lr=1e-2, num_critic_only_steps=1)}


def metrics_of(metrics):
    return {name: value for name, value in metrics.items() if not name.startswith("perf/")}


def test_policy_and_critic_apart_learn_what_they_learn_together_and_save_where_it_does(
    make_learner, settings, tmp_path
):
    batches = [make_batch(seed=0, n_steps=2), replace(make_batch(seed=1, n_steps=2), step=2)]
    apart = {"settings": settings | {"apart": frozenset({"critic"})}, "lr": 1e-2}
    learner = make_learner(actor_critic(), settings=settings, lr=1e-2)
    together = [learner.train(batch) for batch in batches]
    for number, batch in enumerate(batches):
        before, after = tmp_path / str(number - 1), tmp_path / str(number)
        columns, found = {}, {}
        # There is one world in a process, so they take turns: the critic's values, the policy's step, the critic's step.
        for role in ("critic", "policy", "critic"):
            learner = make_learner(actor_critic(), role=role, **apart)
            if number:
                learner.load(before)
            begun = learner.begin(batch)
            if role == "policy":
                columns = learner.credit(columns)
            if role == "policy" or "returns" in columns:
                found |= learner.learn(columns)
                learner.save(after)
            columns = columns or begun
        assert sorted(columns) == ["loss_mask", "returns", "weights"]
        assert metrics_of(found) == metrics_of(together[number])
        assert found["perf/pools_wait_time"] >= 0
    assert (tmp_path / "1/trainer.json").exists() and (tmp_path / "1/critic/trainer.json").exists()
    learner = make_learner(actor_critic(), settings=settings, lr=1e-2)
    for batch in batches:
        learner.train(batch)
    unbroken = learner.train(make_batch(seed=2))
    learner = make_learner(actor_critic(), settings=settings, lr=1e-2)
    learner.load(tmp_path / "1")
    assert metrics_of(learner.train(make_batch(seed=2))) == metrics_of(unbroken)


def test_a_loss_of_the_critic_may_read_what_a_critic_alone_knows():
    def loss(view, returns):
        raise AssertionError("not called")

    assert list(apart_problems(replace(actor_critic(), value_loss=value_loss), "ppo")) == []
    algorithm = replace(actor_critic(), value_loss=loss)
    assert list(apart_problems(algorithm, "ppo")) == []
    loss.needs = lambda options: frozenset({"values", "ref_log_probs"})
    (problem,) = apart_problems(algorithm, "ppo")
    assert problem.found == "a loss that reads ref_log_probs, beside a critic in processes of its own"
