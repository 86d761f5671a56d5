"""What estimators do to their credit, they do to a custom advantage function's: numbers by hand, settings from flags and recipes."""

from __future__ import annotations

import math

import pytest
from slime_algos.testing import view_of
from slime_compat.adapters.training import ReferenceAdvantages
from slime_core.config.functions import run_args
from slime_core.config.load import load_settings
from slime_core.errors import ConfigError, PluginError
from slime_core.plugins.registry import Registry
from slime_core.run.assemble import algorithm

NEEDED = ("--hf-checkpoint", "m", "--rollout-batch-size", "1", "--rollout-max-response-len", "8")


@pytest.fixture(scope="module")
def registry():
    return Registry()


@pytest.fixture
def chosen(registry):
    """Return the algorithm of a function of `own_advantages` and flags, or a recipe."""

    def chosen(function: str, *flags: str, recipe: str | None = None):
        given = [*NEEDED, "--custom-advantage-function-path", f"own_advantages.{function}", *flags]
        return algorithm(load_settings([recipe] if recipe else [], given, registry=registry), registry)

    return chosen


def two_samples(**columns):
    """Two samples of rewards 1 and 3, of two tokens each; the last is not trained on."""
    return view_of([[1, 1], [1, 0]], rewards=[1.0, 3.0], **columns)


def test_without_options_the_advantages_are_the_functions_own(chosen):
    advantages, returns, *more = chosen("of_rewards").estimator(two_samples())
    assert advantages.tolist() == returns.tolist() == [1.0, 1.0, 3.0, 3.0]
    assert more == []


def test_advantages_are_whitened_over_trained_tokens(chosen):
    advantages, returns, *_ = chosen("of_rewards", "--normalize-advantages").estimator(two_samples())
    # Of 1, 1 and 3 the mean is 5/3, the unbiased variance ((2/3)^2 + (2/3)^2 + (4/3)^2) / 2 = 4/3.
    low, high = -(2 / 3) / math.sqrt(4 / 3), (4 / 3) / math.sqrt(4 / 3)
    assert advantages.tolist() == pytest.approx([low, low, high, 0.0], abs=1e-6)
    assert returns.tolist() == [1.0, 1.0, 3.0, 3.0]


def test_settings_of_a_recipe_apply_as_flags_do(chosen, tmp_path):
    recipe = tmp_path / "recipe.toml"
    recipe.write_text("[algos]\nnormalize_advantages = true\n")
    white = chosen("of_rewards", recipe=str(recipe)).estimator(two_samples())[0][:3]
    assert float(white.mean()) == pytest.approx(0.0, abs=1e-6)
    assert float(white.var()) == pytest.approx(1.0, rel=1e-5)


def test_distillation_is_taken_off_before_whitening(chosen):
    columns = {
        "old_log_probs": [[-1.0, -2.0], [-1.0, -9.0]],
        "teacher_log_probs": [[-1.5, -1.0], [-3.0, -0.5]],
    }
    flags = ("--use-opd", "--opd-kl-coef", "0.5")
    made = chosen("of_rewards", *flags)
    assert "teacher_log_probs" in made.needs
    advantages, _, metrics = made.estimator(two_samples(**columns))
    # log pi_old - log pi_teacher is 0.5, -1 and 2; half of it is taken off.
    assert advantages[:3].tolist() == pytest.approx([1.0 - 0.25, 1.0 + 0.5, 3.0 - 1.0])
    assert float(metrics["opd_reverse_kl"]) == pytest.approx(((0.5 - 1.0) / 2 + 2.0) / 2)
    white = chosen("of_rewards", *flags, "--normalize-advantages").estimator(two_samples(**columns))[0]
    mean, deviation = 17 / 12, math.sqrt(57 / 144)  # of 3/4, 3/2 and 2: (64 + 1 + 49) / 144 / 2
    assert white[:3].tolist() == pytest.approx([(x - mean) / deviation for x in (0.75, 1.5, 2.0)], abs=1e-6)


def test_importance_weights_and_rejection_go_with_the_advantages(chosen):
    view = two_samples(
        old_log_probs=[[0.0, math.log(1.5)], [math.log(4.0), 9.0]],
        rollout_log_probs=[[0.0, 0.0], [0.0, 0.0]],
        staleness=[[0, 1], [2, 0]],
    )
    made = chosen("of_rewards", "--use-tis")
    assert {"old_log_probs", "rollout_log_probs"} <= made.needs
    advantages, _, metrics, state, correction = made.estimator(view)
    assert advantages.tolist() == [1.0, 1.0, 3.0, 3.0] and state == {}
    assert correction.importance.tolist() == pytest.approx([1.0, 1.5, 2.0, 1.0])
    assert float(metrics["tis"]) == pytest.approx((1.0 + 1.5 + 4.0) / 3)
    kept = chosen("of_rewards", "--use-rs").estimator(view)[4].kept
    assert kept[:3].tolist() == [True, True, False]
    made = chosen("of_rewards", "--max-token-staleness", "0", "--staleness-metrics", "--use-tis")
    assert "staleness" in made.needs
    _, _, metrics, _, correction = made.estimator(view)
    assert correction.kept[:3].tolist() == [True, False, False]
    assert any(name.endswith("_stale") for name in metrics)


def test_a_correction_of_its_own_takes_the_place_of_importance_weights(chosen):
    flags = ("--use-tis", "--custom-tis-function-path", "own_advantages.doubled")
    view = two_samples(
        old_log_probs=[[1.0, 0.0], [0.0, 0.0]],
        rollout_log_probs=[[0.0, 0.0], [0.0, 0.0]],
        total_lengths=[[3], [4]],
    )
    *_, correction = chosen("of_rewards", *flags).estimator(view)
    assert correction.importance.tolist() == [2.0, 2.0, 2.0, 2.0]


def test_importance_weights_are_refused_beside_a_loss_that_leaves_them_out(chosen):
    with pytest.raises(PluginError, match="does not apply the importance weights that the estimator gives"):
        chosen("of_rewards", "--use-tis", "--custom-loss-function-path", "trainer_hooks.reinforce")


def test_the_estimator_that_is_named_beside_it_still_chooses_objective_and_critic(chosen):
    def loss_and_values(estimator: str) -> tuple[str, bool, bool]:
        made = chosen("of_rewards", "--advantage-estimator", estimator)
        return made.loss.__name__, "values" in made.needs, made.value_loss is not None

    assert loss_and_values("grpo") == ("policy_loss", False, False)
    assert loss_and_values("gspo") == ("gspo_loss", False, False)
    assert loss_and_values("cispo") == ("cispo_loss", False, False)
    assert loss_and_values("ppo") == ("policy_loss", True, True)


def test_a_function_sees_what_columns_hold_where_the_mask_is_0(chosen):
    view = two_samples(old_log_probs=[[-1.0, -2.0], [-3.0, -4.0]])
    assert chosen("of_log_probs").estimator(view)[0].tolist() == [-1.0, -2.0, -3.0, -4.0]


def test_the_divergence_is_given_without_its_coefficient(chosen):
    view = two_samples(old_log_probs=[[-1.0, -2.0], [-1.0, -9.0]], ref_log_probs=[[-3.0, -1.0], [-1.0, -5.0]])
    made = chosen("less_divergence", "--kl-coef", "0.1", "--kl-loss-type", "k2")
    assert "ref_log_probs" in made.needs
    advantages, kl, metrics = made.estimator(view)
    # k2 of 2, -1 and 0 is half their square; that of the last token, which nobody trains on, is there as well.
    assert kl.tolist() == [2.0, 0.5, 0.0, 8.0]
    assert advantages[:3].tolist() == pytest.approx([1.0 - 0.2, 1.0 - 0.05, 3.0])
    assert float(metrics["reward_kl"]) == pytest.approx((2.5 / 2 + 0.0) / 2)


def test_the_divergence_is_zero_without_a_coefficient(chosen):
    view = two_samples(old_log_probs=[[-1.0] * 2] * 2, ref_log_probs=[[-3.0] * 2] * 2)
    assert chosen("less_divergence", "--use-kl-loss").estimator(view)[1].tolist() == [0.0] * 4


def test_args_have_the_coefficient_that_a_target_has_moved(chosen):
    view = two_samples(old_log_probs=[[-1.0] * 2] * 2, ref_log_probs=[[-2.0] * 2] * 2)
    estimate = chosen("less_divergence", "--kl-coef", "0.1", "--kl-target", "0.5").estimator
    advantages, _, _, state = estimate(view, state={})
    assert advantages.tolist() == pytest.approx([0.9, 0.9, 2.9, 2.9])
    # The divergence is 1, twice the target: 0.1 times 1 + 0.2 * 2 samples / 10,000.
    assert state["kl_coef"] == pytest.approx(0.1 * (1 + 0.2 * 2 / 10_000))
    advantages = estimate(view, state={"kl_coef": 0.3})[0]
    assert advantages.tolist() == pytest.approx([0.7, 0.7, 2.7, 2.7])


def test_a_column_that_is_not_there_is_refused_with_those_that_are(chosen):
    told = r"own_advantages:of_tokens: raised KeyError: 'tokens'; the columns that it is given are kl, log_probs, loss_masks, "
    with pytest.raises(PluginError, match=told):
        chosen("of_tokens").estimator(two_samples())


def test_without_slime_algos_the_function_is_called_and_its_settings_are_refused():
    alone = Registry(allow=["slime-compat", "slime-rm"])
    settings = load_settings([], NEEDED, registry=alone)
    estimate = ReferenceAdvantages(path="own_advantages:of_rewards", run_args=run_args(settings))
    advantages, returns = estimate(two_samples())
    assert advantages.tolist() == returns.tolist() == [1.0, 1.0, 3.0, 3.0]
    with pytest.raises(ConfigError, match="normalize-advantages"):
        load_settings([], [*NEEDED, "--normalize-advantages"], registry=alone)
