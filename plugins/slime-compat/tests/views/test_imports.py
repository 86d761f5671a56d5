"""The import names of the reference system, and what is behind them."""

from __future__ import annotations

import asyncio
import importlib
import pkgutil
from types import SimpleNamespace

import pytest
import slime
from slime.rollout.filter_hub.base_types import MetricGatherer
from slime.rollout.filter_hub.dynamic_sampling_filters import (
    check_reward_nonzero_std,
    check_reward_nonzero_std_with_fallback,
)
from slime.rollout.rm_hub import async_rm, batched_async_rm
from slime.rollout.rm_hub.f1 import f1_score
from slime.rollout.rm_hub.math_dapo_utils import compute_score, last_boxed_only_string, remove_boxed
from slime.rollout.rm_hub.math_utils import extract_answer, grade_answer_verl
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.arguments import parse_args
from slime.utils.async_utils import run
from slime.utils.mask_utils import MultiTurnLossMaskGenerator
from slime.utils.metric_utils import compute_pass_rate, compute_statistics, dict_add_prefix, has_repetition
from slime.utils.misc import load_function, should_run_periodic_action
from slime.utils.processing_utils import build_processor_kwargs, process_vision_info
from slime.utils.trace_utils import build_sglang_meta_trace_attrs, trace_span
from slime.utils.types import Sample
from slime_compat.engine.tokenizer import PlainTokenizer
from slime_compat.views.running.absent import MODULES
from slime_core.errors import DataError, PluginError
from slime_core.testing.tabular import LetterTokenizer

ARGS = SimpleNamespace(reward_key=None, custom_rm_path=None, rm_type="math")


def test_every_module_imports_and_has_what_it_lists_or_says_what_to_use():
    names = [module.name for module in pkgutil.walk_packages(slime.__path__, "slime.")]
    assert len(names) > 60
    for name in names:
        if name in MODULES:
            with pytest.raises(ImportError, match=f"{name} is not here: .*; use ") as caught:
                importlib.import_module(name)
            assert caught.value.name == name
            continue
        module = importlib.import_module(name)
        assert all(hasattr(module, each) for each in getattr(module, "__all__", ())), name
    assert set(MODULES) - {"slime_plugins"} <= set(names)


def test_a_module_within_one_that_is_not_here_is_refused_alike():
    with pytest.raises(ImportError, match=r"slime.ray is not here: who gets which GPU"):
        importlib.import_module("slime.ray.placement_group")
    with pytest.raises(ImportError, match=r"slime_plugins is not here: .* there is no buffer server; use"):
        importlib.import_module("slime_plugins.rollout_buffer.rollout_buffer_example")


def test_names_that_are_not_here_say_what_to_use():
    with pytest.raises(ImportError, match=r"compute_opsm_mask is not here: .* use --use-opsm"):
        from slime.utils.ppo_utils import compute_opsm_mask  # noqa: F401  # refused
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from slime.utils.ppo_utils import nothing  # noqa: F401  # unknown


def test_functions_load_by_both_spellings():
    assert load_function("slime.utils.misc.load_function") is load_function("slime.utils.misc:load_function")


def test_rewards_are_those_of_ours():
    assert grade_answer_verl("so \\boxed{\\frac{1}{2}}", "0.5") and not grade_answer_verl("\\boxed{3}", "4")
    assert extract_answer("a \\boxed{7} b") == "7"
    assert compute_score("Answer: 12", "12") == {"score": 1.0, "acc": True, "pred": "12"}
    assert compute_score("Answer: 13", "12")["score"] == -1.0
    assert last_boxed_only_string("a \\fbox{x} b \\boxed{\\frac{1}{2}}") == "\\boxed{\\frac{1}{2}}"
    assert remove_boxed("\\boxed{\\frac{1}{2}}") == "\\frac{1}{2}" and remove_boxed(None) is None
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


def test_advantages_of_formulae():
    import torch
    from slime.utils.ppo_utils import (
        compute_gspo_kl,
        get_grpo_returns,
        get_reinforce_plus_plus_baseline_advantages,
    )

    kl = [torch.tensor([1.0, 3.0]), torch.tensor([2.0])]
    assert [one.tolist() for one in get_grpo_returns([0.5, -1.0], kl)] == [[0.5, 0.5], [-1.0]]
    shaped = get_reinforce_plus_plus_baseline_advantages([0.5, -1.0], kl, None, 0.5)
    assert [one.tolist() for one in shaped] == [[0.0, -1.0], [-2.0]]
    old, masks = [torch.zeros(2), torch.zeros(1)], [torch.tensor([1.0, 0.0]), torch.ones(1)]
    # Of the first sample one token counts, whose log-prob rose by 1.
    assert compute_gspo_kl(kl, old, kl, masks).tolist() == [-1.0, -1.0, -2.0]


def test_a_periodic_action_is_due_at_its_interval_at_epochs_and_at_the_end():
    due = [n for n in range(10) if should_run_periodic_action(n, 4, 5, 10)]
    assert due == [3, 4, 7, 9]
    assert not any(should_run_periodic_action(n, None, 5, 10) for n in range(10))


def test_dropped_groups_are_counted_by_reason():
    gatherer = MetricGatherer()
    for reason in ("zero_std_1.0", "zero_std_1.0", None, "short"):
        gatherer.on_dynamic_filter_drop(reason)
    assert gatherer.collect() == {
        "rollout/dynamic_filter/drop_zero_std_1.0": 2,
        "rollout/dynamic_filter/drop_short": 1,
    }


def test_a_span_takes_what_the_engine_said(caplog):
    with (
        caplog.at_level("DEBUG", logger="slime_compat.views.running.timing"),
        trace_span(None, "ask", attrs={"turn": 1}) as span,
    ):
        span.update(build_sglang_meta_trace_attrs({"completion_tokens": 3, "output_token_logprobs": []}))
    assert "ask" in caplog.text and "{'turn': 1, 'completion_tokens': 3}" in caplog.text


def test_images_of_messages_are_opened(tmp_path):
    from PIL import Image

    Image.new("RGB", (2, 3)).save(tmp_path / "a.png")
    content = [{"type": "image", "image": str(tmp_path / "a.png")}, {"type": "text", "text": "?"}]
    seen = process_vision_info([{"role": "user", "content": content}])
    assert [image.size for image in seen["images"]] == [(2, 3)] and seen["videos"] is None
    assert list(build_processor_kwargs(seen)) == ["images"]
    with pytest.raises(DataError, match=r"image nowhere.png: FileNotFoundError"):
        process_vision_info([{"role": "user", "content": [{"type": "image", "image": "nowhere.png"}]}])


def test_a_command_line_is_args_with_arguments_of_a_users_own(monkeypatch, tmp_path):
    words = "--num-layers 2 --hidden-size 8 --rollout-batch-size 4 --n-samples-per-prompt 2 --lr 1e-5 --depth 3 --rollout-max-response-len 8"
    monkeypatch.setattr("sys.argv", ["train.py", "--hf-checkpoint", str(tmp_path), *words.split()])

    def add(parser):
        parser.add_argument("--depth", type=int, default=1)
        return parser

    args = parse_args(add)
    assert (args.depth, args.lr, args.rollout_batch_size, args.hf_checkpoint) == (3, 1e-5, 4, str(tmp_path))
