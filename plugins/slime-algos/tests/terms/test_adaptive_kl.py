"""The adaptive coefficient of the KL penalty: by hand, and as the state of an estimator."""

import json
import math

import pytest
import torch
from slime_algos.advantages.grpo import grpo
from slime_algos.terms.adaptive_kl import next_kl_coef
from slime_algos.testing import view_of

STEER = {"kl_coef": 0.5, "kl_target": 2.0, "kl_horizon": 20.0}


def apart(*kl):
    """Two samples whose k1 is `kl` at each token, and a third one that is not trained on."""
    return view_of(
        [[1, 1], [1], [0]],
        rewards=[0.0, 0.0, 0.0],
        ref_log_probs=[[-kl[0], -kl[1]], [-kl[2]], [-9.0]],
    )


@pytest.mark.parametrize(
    ("kl", "wanted"),
    [
        (2.0, 0.5),
        (2.2, 0.5 * (1 + 0.1 * 4 / 20)),
        (9.0, 0.5 * (1 + 0.2 * 4 / 20)),  # no faster than 20%
        (-9.0, 0.5 * (1 - 0.2 * 4 / 20)),
        (math.inf, 0.5 * (1 + 0.2 * 4 / 20)),
        (math.nan, 0.5),
    ],
)
def test_the_coefficient_follows_the_relative_error(kl, wanted):
    found = next_kl_coef(0.5, kl, target=2.0, horizon=20.0, n_samples=4)
    assert found == pytest.approx(wanted, rel=1e-12)


def test_the_next_batch_is_penalised_by_the_coefficient_that_this_one_led_to():
    # means of the two trained samples: (1 + 3) / 2 = 2 and 2.4; their mean is 2.2, 10% above; 3 samples of 20
    view = apart(1.0, 3.0, 2.4)
    advantages, _, metrics, state = grpo(view, **STEER)
    assert advantages.tolist() == pytest.approx([-2.0, -1.5, -1.2, 0.0])
    assert metrics["reward_kl"].item() == pytest.approx(2.2)
    assert metrics["kl_coef"] == 0.5
    assert state == {"kl_coef": pytest.approx(0.5 * 1.015)}
    later, _, metrics, _ = grpo(view, **STEER, state=state)
    assert metrics["kl_coef"] == state["kl_coef"]
    assert later.tolist() == pytest.approx([1.015 * x for x in advantages.tolist()])


def test_a_state_that_was_written_and_read_gives_the_same_numbers():
    view = apart(0.1, 0.7, 0.3)
    *_, state = grpo(view, **STEER)
    read = json.loads(json.dumps(state))
    again, same = (grpo(view, **STEER, state=one) for one in (state, read))
    assert torch.equal(again[0], same[0])
    assert again[3] == same[3]


def test_a_fixed_coefficient_has_no_state_and_ignores_one():
    found = grpo(apart(1.0, 3.0, 2.4), kl_coef=0.5, state={"kl_coef": 7.0})
    assert len(found) == 3
    assert found[2]["kl_coef"] == 0.5


def test_a_batch_without_trained_tokens_leaves_the_coefficient():
    view = view_of([[0, 0]], rewards=[1.0], ref_log_probs=[[-1.0, -1.0]])
    assert grpo(view, **STEER)[3] == {"kl_coef": 0.5}
