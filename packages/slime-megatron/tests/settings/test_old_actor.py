"""Which runs `keep_old_actor` can serve with the weights of two syncs."""

import pytest
from slime_core.config.sections import RolloutSection, RunSection, TrainSection
from slime_megatron.settings.checks import old_actor_problems
from slime_megatron.settings.section_roles import RolesSection


@pytest.mark.parametrize(
    ("loop", "rollout", "interval", "is_refused"),
    [
        ("fully-async", {}, 1, False),  # a bound of 1: step 5 trains version 4, on tokens of 3 and 4
        ("fully-async", {"max_staleness": 2}, 1, True),  # 2, 3 and 4
        ("slime-core/fully-async", {"max_staleness": 2}, 1, True),
        ("fully-async", {"max_staleness": 1}, 2, False),  # step 6 trains version 5, on tokens of 4, and of 5 if that was sent
        ("fully-async", {"max_staleness": 3}, 2, True),  # and of 2, with 3 and 4 sent after it where step 3 is evaluated
        ("one-step-off", {}, 1, False),
        ("sync", {"max_staleness": 9}, 1, False),
        ("sync", {"partial_rollout": True}, 1, True),  # of any age
        ("one-step-off", {"partial_rollout": True}, 1, True),
        ("sync", {"partial_rollout": True, "max_staleness": 2}, 1, True),
        ("sync", {"partial_rollout": True, "max_staleness": 1}, 1, False),
        ("one-step-off", {"partial_rollout": True, "max_staleness": 1}, 1, False),
        ("sync", {"partial_rollout": True, "mask_offpolicy_in_partial_rollout": True}, 1, False),
    ],
)  # fmt: skip
def test_a_step_may_train_on_tokens_of_the_last_two_versions_that_were_sent(
    loop, rollout, interval, is_refused
):
    run = RunSection(loop=loop, num_rollout=1)
    section = RolloutSection(rollout_batch_size=1, rollout_max_response_len=1, **rollout)
    train = TrainSection(update_weights_interval=interval)
    problems = list(old_actor_problems(run, train, section, RolesSection(keep_old_actor=True)))
    assert [problem.where for problem in problems] == ["roles.keep_old_actor"] * is_refused
    assert all("a max_staleness of at most 1" in problem.wanted for problem in problems)
    assert list(old_actor_problems(run, train, section, RolesSection())) == []
