"""The import names of the reference system, and what is behind them."""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
from types import SimpleNamespace

import pytest
import slime
from slime.rollout.filter_hub.dynamic_sampling_filters import (
    check_reward_nonzero_std,
    check_reward_nonzero_std_with_fallback,
)
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.rm_hub.f1 import f1_score
from slime.rollout.rm_hub.math_dapo_utils import compute_score
from slime.rollout.rm_hub.math_utils import extract_answer, grade_answer_verl
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.async_utils import run
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.metric_utils import compute_pass_rate, compute_statistics, dict_add_prefix, has_repetition
from slime.utils.misc import load_function
from slime.utils.types import Sample
from slime_compat.engine.tokenizer import PlainTokenizer
from slime_core.errors import DataError, PluginError
from slime_core.testing.tabular import LetterTokenizer

ARGS = SimpleNamespace(reward_key=None, custom_rm_path=None, rm_type="math")


def test_every_module_imports_and_has_what_it_lists():
    names = [module.name for module in pkgutil.walk_packages(slime.__path__, "slime.")]
    assert len(names) > 30
    for name in names:
        module = importlib.import_module(name)
        assert all(hasattr(module, each) for each in getattr(module, "__all__", ())), name


def test_functions_load_by_both_spellings():
    assert load_function("slime.utils.misc.load_function") is load_function("slime.utils.misc:load_function")


def test_rewards_are_those_of_ours():
    assert grade_answer_verl("so \\boxed{\\frac{1}{2}}", "0.5") and not grade_answer_verl("\\boxed{3}", "4")
    assert extract_answer("a \\boxed{7} b") == "7"
    assert compute_score("Answer: 12", "12") == {"score": 1.0, "acc": True, "pred": "12"}
    assert compute_score("Answer: 13", "12")["score"] == -1.0
    assert f1_score("the big cat", "big dog") == (0.5, 0.5, 0.5)


def test_a_sample_chooses_its_reward():
    samples = [Sample(index=i, response="\\boxed{3}", label=str(i)) for i in range(2, 4)]
    assert [
        one["score"] if isinstance(one, dict) else one for one in asyncio.run(batched_async_rm(ARGS, samples))
    ] == [0.0, 1.0]
    samples[0].metadata["rm_type"] = "random"
    assert asyncio.run(async_rm(ARGS, samples[0])) in (0.0, 1.0)
    nothing = SimpleNamespace(custom_rm_path=None, rm_type=None)
    with pytest.raises(PluginError, match="sample 3: nothing says how it is scored"):
        asyncio.run(async_rm(nothing, samples[1]))


def test_filters_look_at_the_spread_of_rewards():
    equal = [Sample(reward=1.0) for _ in range(3)]
    mixed = [*equal, Sample(reward=0.0)]
    assert check_reward_nonzero_std(ARGS, mixed).keep
    told = check_reward_nonzero_std(ARGS, equal)
    assert (told.keep, told.reason, told.keep_when_insufficient) == (False, "zero_std_1.0", False)
    assert check_reward_nonzero_std_with_fallback(ARGS, equal).keep_when_insufficient


def test_statistics():
    # Of groups [1, 0] and [0, 0]: one of one is right a quarter of the time, one of two in half of the groups.
    assert compute_pass_rate([1, 0, 0, 0], 2) == {"pass@1": 0.25, "pass@2": 0.5}
    with pytest.raises(DataError, match="3 rewards do not make groups of 2"):
        compute_pass_rate([1, 0, 0], 2)
    assert compute_statistics([1, 2, 6]) == {"mean": 3.0, "median": 2.0, "max": 6.0, "min": 1.0}
    assert dict_add_prefix({"a": 1}, "x/") == {"x/a": 1}
    assert has_repetition("again " * 5000) and not has_repetition("short")


def test_loss_masks_are_those_of_ours():
    tokenizer = PlainTokenizer(LetterTokenizer())
    generator = MultiTurnLossMaskGenerator(tokenizer, "qwen")
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    ids, mask = generator.get_loss_mask(messages)
    assert ids[:3] == [0, 1, 2] and mask[:3] == [0, 0, 1]
    assert generator.get_response_lengths([[0, 0, 1, 0, 1]]) == [3]
    assert generator.get_text_from_loss_mask([0, 1, 2, 3], [0, 1, 1, 0]) == ["bc"]


def test_what_needs_a_run_says_so():
    with pytest.raises(PluginError, match="GenerateState needs a run"):
        GenerateState(ARGS)

    async def one():
        return 3

    assert run(one()) == 3


def test_formulae():
    import torch
    from slime.utils.ppo_utils import compute_approx_kl, compute_policy_loss

    new, old, advantages = torch.tensor([0.0, 0.0]), torch.tensor([-1.0, 1.0]), torch.tensor([1.0, 1.0])
    assert compute_approx_kl(new, old, "k1").tolist() == [1.0, -1.0]
    loss, clipped = compute_policy_loss(old - new, advantages, 0.2, 0.3)
    # Ratios e and 1/e, clipped to 1.3 and 0.8; of gains that are positive the smaller one counts.
    assert loss.tolist() == pytest.approx([-1.3, -0.36787944])
    assert clipped.tolist() == [1.0, 0.0]
