"""The section `algos` and its check."""

import math

import importlib_metadata
import pytest
from pydantic import ValidationError
from slime_algos.hooks import NEEDED, slime_check_config, slime_config_sections
from slime_algos.numerics import OPENRLHF, SLIME, TRL, VERL
from slime_algos.section import AlgosSection
from slime_core.config.sections import AlgorithmSection, RewardSection, RolloutSection, TrainSection
from slime_core.config.settings import Settings
from slime_core.plugins.bind import options_of

GROUPS = ("slime.advantages", "slime.losses", "slime.reducers", "slime.reward_transforms")

SIZES = {"rollout_batch_size": 4, "rollout_max_response_len": 8}


def check(*, origin="a flag", **values):
    """Return the problems of some settings, given by section: algos, algorithm, reward, rollout, train; all from one origin."""
    sections = {
        "algos": AlgosSection(**values.get("algos", {})),
        "algorithm": AlgorithmSection(**values.get("algorithm", {})),
        "reward": RewardSection(**values.get("reward", {})),
        "rollout": RolloutSection(**SIZES | values.get("rollout", {})),
        "train": TrainSection(**values.get("train", {})),
    }
    origins = {(table, field): origin for table, given in values.items() for field in given}
    return list(slime_check_config(Settings(sections, origins, {})))


def test_flags_have_no_prefix():
    (section,) = slime_config_sections()
    assert (section.name, section.model, section.prefix) == ("algos", AlgosSection, "")


@pytest.mark.parametrize(
    "values",
    [
        {"eps_clip": 1.1},
        {"eps_clip": -0.1},
        {"eps_clip_c": 1.0},
        {"kl_loss_coef": -1.0},
        {"kl_loss_type": "k4"},
    ],
)
def test_values_out_of_range_are_refused(values):
    with pytest.raises(ValidationError):
        AlgosSection(**values)


def test_kl_weight_without_kl_is_a_problem():
    (problem,) = check(algos={"kl_loss_coef": 0.1})
    assert problem.where == "algos.kl_loss_coef"
    assert problem.todo == "add --use-kl-loss"


@pytest.mark.parametrize(
    ("name", "value", "switch"),
    [
        ("tis_clip", 3.0, "use_tis"),
        ("tis_batch_normalize", True, "use_tis"),
        ("rs_veto_threshold", 1e-4, "use_rs"),
        ("opsm_delta", 1e-3, "use_opsm"),
        ("opd_kl_coef", 0.5, "use_opd"),
        ("use_unbiased_kl", True, "use_kl_loss"),
        ("kl_horizon", 500.0, "kl_target"),
        ("passk_std_eps", 1e-3, "passk_std_normalization"),
    ],
)
def test_a_setting_that_nothing_reads_is_a_problem_until_its_switch_is_given(name, value, switch):
    (problem,) = check(algos={name: value})
    assert problem.where == f"algos.{name}"
    assert problem.found == f"{value} without {switch}, so it has no effect"
    assert problem.todo.startswith(f"add --{switch.replace('_', '-')}")
    # A recipe that a run writes has every setting, with the switches off.
    assert check(algos={name: value, switch: None if switch == "kl_target" else False}) == []
    on = {"kl_target": 0.1, "kl_coef": 0.1} if switch == "kl_target" else {switch: True}
    assert check(algos={name: value, **on}) == []


def test_a_setting_that_nothing_reads_is_left_where_a_convention_or_a_default_gave_it_or_a_function_may_read_it():
    assert check(algos={"tis_clip": 2.0}) == []
    assert check(algos={"tis_clip": 3.0}, algorithm={"custom_tis_function_path": "own.mismatch"}) == []
    assert check(origin="numerics openrlhf", algos={"tis_clip": 5.0}) == []


def test_every_setting_that_needs_another_is_one_of_the_section():
    assert {*NEEDED, *(name for names in NEEDED.values() for name in names)} <= {*AlgosSection.model_fields}


@pytest.mark.parametrize("values", [{}, {"use_kl_loss": True}, {"use_kl_loss": True, "kl_loss_coef": 0.1}])
def test_kl_settings_that_agree_are_no_problem(values):
    assert check(algos=values) == []


def test_an_adaptive_coefficient_begins_somewhere_and_moves_slowly():
    (problem,) = check(algos={"kl_target": 0.1})
    assert problem.where == "algos.kl_target"
    samples = {"rollout_batch_size": 16, "n_samples_per_prompt": 8}
    adaptive = {"kl_target": 0.1, "kl_coef": 0.05}
    (problem,) = check(algos=adaptive | {"kl_horizon": 100.0}, rollout=samples)
    assert problem.where == "algos.kl_horizon"
    assert "128 samples" in problem.found
    assert check(algos=adaptive | {"kl_horizon": 128.0}, rollout=samples) == []


def test_kl_in_reward_and_loss_is_a_problem():
    (problem,) = check(algos={"kl_coef": 0.1, "kl_loss_coef": 0.1, "use_kl_loss": True})
    assert problem.where == "algos.kl_coef and algos.kl_loss_coef"


@pytest.mark.parametrize(
    ("conventions", "is_of_both"), [(SLIME, True), (OPENRLHF, True), (VERL, False), (TRL, False)]
)
def test_conventions_say_how_a_kl_loss_is_estimated_and_not_a_penalty_in_the_reward(conventions, is_of_both):
    kind = {"kl_loss_type": conventions["algos"]["kl_loss_type"]}
    problems = check(origin="numerics theirs", algos=kind | {"kl_coef": 0.1})
    assert [p.where for p in problems] == ([] if is_of_both else ["algos.kl_loss_type"])
    assert all(p.todo == "add --kl-loss-type k1, as verl and TRL have it" for p in problems)
    assert check(origin="a flag", algos=kind | {"kl_coef": 0.1}) == []  # if it was asked for
    assert check(origin="numerics theirs", algos=kind | {"use_kl_loss": True, "kl_loss_coef": 0.1}) == []


@pytest.mark.parametrize(
    "name", ["reinforce_plus_plus", "reinforce_plus_plus_baseline", "slime-algos/reinforce_plus_plus"]
)
def test_reinforce_plus_plus_wants_whitening(name):
    (problem,) = check(algorithm={"advantage_estimator": name})
    assert problem.todo == "add --normalize-advantages"
    assert check(algorithm={"advantage_estimator": name}, algos={"normalize_advantages": True}) == []


@pytest.mark.parametrize(
    "algorithm",
    [
        {"advantage_estimator": "gspo"},
        {"advantage_estimator": "slime-algos/gspo"},
        {"advantage_estimator": "grpo", "loss_type": "gspo_loss"},
        {"advantage_estimator": "grpo", "loss_type": "slime-algos/gspo_loss"},
    ],
)
def test_gspo_wants_a_bound_of_its_own(algorithm):
    (problem,) = check(algorithm=algorithm)
    assert problem.todo == "add the paper's: --eps-clip 3e-4 --eps-clip-high 4e-4"
    (problem,) = check(origin="numerics trl", algorithm=algorithm, algos={"eps_clip": 0.2})
    assert problem.found == "0.2 (numerics trl) with gspo_loss, none of whose ratios it clips"
    assert check(algorithm=algorithm, algos={"eps_clip": 0.2}) == []  # if it was asked for
    assert check(algorithm={"advantage_estimator": "gspo", "loss_type": "policy_loss"}) == []


@pytest.mark.parametrize("name", ["gspo", "gdpo", "reinforce_plus_plus"])
def test_nothing_is_asked_of_an_estimator_and_a_loss_that_functions_of_ones_own_replace(name):
    own = {"custom_advantage_function_path": "own.credit", "custom_loss_function_path": "own.loss"}
    assert check(algorithm={"advantage_estimator": name}) != []
    assert check(algorithm={"advantage_estimator": name} | own) == []


def gdpo(weights, **reward):
    return check(
        algorithm={"advantage_estimator": "gdpo"},
        algos={"normalize_advantages": True, "gdpo_weights": weights},
        reward=reward,
    )


def test_gdpo_names_parts_that_the_rewards_have():
    several = {"math": 1.0, "ifbench": 0.5}
    assert gdpo({"math": 1.0, "ifbench": 2.0, "score": 1.0}, rm_weights=several) == []
    assert gdpo({"anything": 1.0}, rm_type="dapo") == []  # what one reward returns is known when it does
    (problem,) = gdpo({"math": 1.0, "ifbnch": 1.0}, rm_weights=several)
    assert str(problem) == (
        "algos.gdpo_weights: found the part 'ifbnch'; wanted one of the rewards of rm_weights: math, ifbench; "
        "did you mean 'ifbench'?"
    )
    (qualified,) = check(
        algorithm={"advantage_estimator": "slime-algos/gdpo"},
        algos={"normalize_advantages": True, "gdpo_weights": {}},
        reward={"rm_weights": several},
    )
    (problem,) = gdpo({}, rm_weights=several)
    assert qualified == problem
    assert problem.todo == """add --gdpo-weights '{"math": 1.0, "ifbench": 0.5}'"""


def test_gdpo_wants_finite_weights_whitening_and_nothing_that_changes_the_score_alone():
    with pytest.raises(ValidationError, match=r"gdpo_weights.acc\n.*finite"):
        gdpo({"acc": math.inf})
    (problem,) = gdpo({"acc": 1.0}, overlong_buffer_len=4)
    assert problem.where == "reward.overlong_buffer_len"
    (problem,) = check(algorithm={"advantage_estimator": "gdpo"}, algos={"gdpo_weights": {"acc": 1.0}})
    assert problem.todo == "add --normalize-advantages"


@pytest.mark.parametrize(
    "bounds",
    [
        {"use_tis": True, "tis_clip_low": 3.0, "tis_clip": 2.0},
        {"use_rs": True, "rs_lower_bound": 3.0, "rs_upper_bound": 2.0},
    ],
)
def test_bounds_the_wrong_way_round_are_a_problem(bounds):
    (problem,) = check(algos=bounds)
    assert problem.found == "3.0 and 2.0"


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("algos.use_tis", {"algos": {"use_tis": True}}),
        ("algos.use_rs", {"algos": {"use_rs": True}}),
        ("algorithm.custom_tis_function_path", {"algorithm": {"custom_tis_function_path": "own.weights"}}),
    ],
)
def test_correction_of_a_policy_against_itself_is_a_problem(name, values):
    (problem,) = check(**values, train={"use_rollout_logprobs": True})
    assert problem.where == name
    assert check(**values) == []


@pytest.mark.parametrize("rejection", [{"use_rs": True}, {"max_token_staleness": 1}])
def test_a_correction_of_ones_own_and_rejection_are_a_problem_before_anything_is_generated(rejection):
    (problem,) = check(algos=rejection, algorithm={"custom_tis_function_path": "own.weights"})
    (name,) = rejection
    assert problem.where == f"algos.{name}"
    assert problem.wanted == "one of the two: both say which tokens are rejected"
    assert check(algos=rejection) == []


def test_options_have_one_default_and_each_setting_is_an_option():
    points = importlib_metadata.entry_points()
    functions = [p.load() for p in points if p.dist.name == "slime-algos" and p.group in GROUPS]
    options = {}
    for function in functions:
        for name, parameter in options_of(function).items():
            assert options.setdefault(name, parameter.default) == parameter.default, (function, name)
    settings = AlgosSection().model_dump()
    assert settings == {name: options[name] for name in settings}
