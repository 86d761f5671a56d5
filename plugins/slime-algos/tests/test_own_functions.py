"""Estimators and losses of somebody's own that slime-algos' decorators make: they heed `[algos]` as those of slime-algos do."""

import pytest
from slime_core.config.load import load_settings
from slime_core.plugins.registry import Registry
from slime_core.run.assemble import algorithm

OWN = '''
from slime_algos.decorators.estimator import estimator
from slime_algos.decorators.objective import policy_objective

@estimator(reward_transform="group-norm")
def credit(view, kl, *, sharpness: float = 1.0):
    """Give each token its sample's reward."""
    advantages = sharpness * view.rewards[view.sample_of_token] - kl
    return advantages, advantages

@policy_objective
def objective(view, log_ratio, advantages, *, eps_clip: float = 0.5):
    """Return the plain policy gradient."""
    return -log_ratio * advantages, {}
'''
RECIPE = """
[model]
hf_checkpoint = "m"
[rollout]
rollout_batch_size = 4
rollout_max_response_len = 8
[algorithm]
custom_advantage_function_path = "somebodys_own:credit"
custom_loss_function_path = "somebodys_own:objective"
[algos]
use_tis = true
tis_clip = 3.0
entropy_coef = 0.01
use_kl_loss = true
kl_loss_coef = 0.1
eps_clip = 0.3
"""


@pytest.fixture
def chosen(tmp_path, monkeypatch):
    (tmp_path / "somebodys_own.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    registry = Registry.from_environment()
    return lambda *flags: algorithm(load_settings([str(recipe)], flags, registry=registry), registry)


def test_options_that_the_decorators_add_come_from_the_recipe(chosen):
    made = chosen()
    estimator, loss = made.estimator.keywords, made.loss.keywords
    assert (estimator["use_tis"], estimator["tis_clip"]) == (True, 3.0)
    assert (loss["entropy_coef"], loss["kl_loss_coef"]) == (0.01, 0.1)
    assert {"rollout_log_probs", "entropy", "ref_log_probs"} <= made.needs


def test_a_table_of_options_goes_before_the_recipe(chosen):
    assert chosen("--loss-args", '{"entropy_coef": 0.5}').loss.keywords["entropy_coef"] == 0.5


def test_an_option_of_its_own_comes_from_its_table_alone(chosen):
    assert "eps_clip" not in chosen().loss.keywords
    assert chosen("--loss-args", '{"eps_clip": 0.2}').loss.keywords["eps_clip"] == 0.2
