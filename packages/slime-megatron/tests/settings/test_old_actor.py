"""Which loops `keep_old_actor` can serve with the weights of two syncs."""

import pytest
from slime_core.config.sections import RolloutSection, RunSection, TrainSection
from slime_megatron.settings.checks import old_actor_problems
from slime_megatron.settings.section_roles import RolesSection


@pytest.mark.parametrize(
    ("loop", "bound", "interval", "most"),
    [
        ("fully-async", None, 1, None),  # a bound of 1: step 5 trains version 4, on tokens of 3 and 4
        ("fully-async", 2, 1, 1),  # 2, 3 and 4
        ("fully-async", 3, 2, None),  # step 6 trains version 5, on tokens of 2 and 4: 3 and 5 are not sent
        ("fully-async", 4, 2, 3),  # step 7 trains version 6, on tokens of 2, 4 and 6
        ("one-step-off", None, 1, None),
        ("sync", 9, 1, None),
    ],
)
def test_a_step_may_train_on_tokens_of_two_versions(loop, bound, interval, most):
    run = RunSection(loop=loop, num_rollout=1)
    rollout = RolloutSection(rollout_batch_size=1, rollout_max_response_len=1, max_staleness=bound)
    train = TrainSection(update_weights_interval=interval)
    problems = list(old_actor_problems(run, train, rollout, RolesSection(keep_old_actor=True)))
    assert [problem.where for problem in problems] == (["roles.keep_old_actor"] if most else [])
    assert all(f"max_staleness of at most {most}:" in problem.wanted for problem in problems)
    assert list(old_actor_problems(run, train, rollout, RolesSection())) == []
