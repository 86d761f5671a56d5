"""Options of estimators, losses, reducers and reward transforms, given as flags where none that is chosen takes them."""

import pytest
from slime_core.checks.unread_flags import unread_flags
from slime_core.config.load import load_settings
from slime_core.plugins.registry import Registry

NEEDED = ["--hf-checkpoint", "m", "--rollout-batch-size", "4", "--rollout-max-response-len", "8"]
#: Estimators whose rewards `group-norm` makes.
GROUP_NORMED = "--advantage-estimator cispo or gdpo or grpo or gspo or multi_turn"
OWN = """
from slime_algos.decorators.estimator import estimator
from slime_algos.decorators.objective import policy_objective

def plain(view, advantages, *, width: float = 1.0):
    raise NotImplementedError

@policy_objective
def decorated(view, log_ratio, advantages, *, width: float = 1.0):
    raise NotImplementedError

@estimator(reward_transform="group-norm")
def credit(view, kl, *, gamma: float = 1.0):
    raise NotImplementedError

def given_everything(args, batch, logits, sum_of_sample_mean):
    raise NotImplementedError
"""


@pytest.fixture
def unread():
    registry = Registry.from_environment()

    def told(*flags: str) -> list[str]:
        settings = load_settings([], [*NEEDED, *flags], registry=registry)
        return [str(problem) for problem in unread_flags([settings], registry)]

    return told


@pytest.mark.parametrize(
    ("flags", "readers"),
    [
        (("--turn-discount", "0.9"), "--advantage-estimator multi_turn"),
        (("--lambd", "0.95"), "--advantage-estimator ppo"),
        (("--gamma", "0.9"), "--advantage-estimator ppo or reinforce_plus_plus"),
        (("--value-clip", "0.4"), "--advantage-estimator ppo"),
        (("--passk-std-normalization",), "--advantage-estimator grpo_passk"),
        (("--sapo-tau-pos", "2"), "--loss-type sapo_loss"),
        (("--set", "algos.dro_beta=0.2"), "--loss-type dro_loss"),
        (("--std-over-batch", "--advantage-estimator", "ppo"), GROUP_NORMED),
        (("--std-ddof", "0", "--disable-rewards-normalization"), GROUP_NORMED),
        (("--eps-clip-c", "3", "--loss-type", "sapo_loss"), "--loss-type gspo_loss or policy_loss"),
    ],
)
def test_a_flag_that_nothing_reads_is_refused_with_what_would(unread, flags, readers):
    typed = "--set algos.dro_beta" if flags[0] == "--set" else flags[0]
    name = typed.removeprefix("--set algos.").removeprefix("--").replace("-", "_")
    table = "algorithm" if name.startswith("std_") else "algos"
    assert unread(*flags) == [
        f"{table}.{name}: found {typed}, which nothing reads here; wanted {readers}, or not this flag"
    ]


@pytest.mark.parametrize(
    ("flag", "value"), [("--value-loss-type", "value_loss"), ("--value-loss-args", '{"value_clip": 0.4}')]
)
def test_a_loss_of_the_critic_is_refused_where_there_is_no_critic(unread, flag, value):
    (found,) = unread(flag, value)
    wanted = "wanted --advantage-estimator ppo, or another that reads values, or not this flag"
    assert found.endswith(f"found {flag}, which nothing reads here; {wanted}")
    assert unread(flag, value, "--advantage-estimator", "ppo") == []


@pytest.mark.parametrize(
    "flags",
    [
        ("--advantage-estimator", "ppo", "--lambd", "0.95", "--gamma", "0.9", "--value-clip", "0.4"),
        ("--loss-type", "sapo_loss", "--sapo-tau-pos", "2", "--use-kl-loss", "--entropy-coef", "0.01"),
        ("--advantage-estimator", "grpo_passk", "--passk-std-normalization"),
        ("--advantage-estimator", "multi_turn", "--turn-discount", "0.9", "--skip-masked"),
        ("--lambd", "1.0", "--turn-discount", "1.0"),  # the defaults
        ("--advantage-estimator", "grpo", "--disable-grpo-std-normalization", "--leave-one-out"),
    ],
)
def test_a_flag_that_is_read_or_says_what_holds_anyway_is_none(unread, flags):
    assert unread(*flags) == []


def test_what_cannot_be_called_is_left_to_the_check_that_tells_of_it(unread):
    assert unread("--staleness-metrics", "--custom-advantage-function-path", "json:dumps") == []


def test_a_recipe_may_hold_options_of_others(tmp_path):
    recipe = tmp_path / "r.toml"
    recipe.write_text("[algos]\nlambd = 0.95\nsapo_tau_pos = 2.0\n")
    registry = Registry.from_environment()
    settings = load_settings([str(recipe)], NEEDED, registry=registry)
    assert list(unread_flags([settings], registry)) == []


def test_a_loss_of_somebodys_own_is_given_its_own_options_alone(unread, tmp_path, monkeypatch):
    (tmp_path / "unread_own_loss.py").write_text(OWN)
    monkeypatch.syspath_prepend(tmp_path)
    chosen = ("--custom-loss-function-path", "unread_own_loss:plain")
    assert [told.partition(":")[0] for told in unread(*chosen, "--eps-clip", "0.3")] == ["algos.eps_clip"]
    assert unread(*chosen, "--normalize-advantages") == []
    mine = ("--custom-loss-function-path", "unread_own_loss:decorated")
    assert unread(*mine, "--entropy-coef", "0.01", "--use-kl-loss", "--kl-loss-coef", "0.1") == []
    assert [told.partition(":")[0] for told in unread(*mine, "--eps-clip", "0.3")] == ["algos.eps_clip"]
    credit = ("--custom-advantage-function-path", "unread_own_loss:credit")
    assert unread(*credit, "--use-tis", "--normalize-advantages") == []
    assert [told.partition(":")[0] for told in unread(*credit, "--gamma", "0.9")] == ["algos.gamma"]
    theirs = ("--custom-loss-function-path", "unread_own_loss:given_everything")
    assert unread(*theirs, "--eps-clip", "0.3") == []  # the reference system's, which is handed all arguments
