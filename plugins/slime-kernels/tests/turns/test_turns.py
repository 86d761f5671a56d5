"""Returns, endings, extraction and what a policy is told, by hand."""

from __future__ import annotations

import pytest
from slime_kernels.judge.reward import RewardScale
from slime_kernels.judge.verdict import EvalStatus, Timing, Verdict, verdict_of
from slime_kernels.problems.problem import ANSWER
from slime_kernels.turns.extraction import candidate_of
from slime_kernels.turns.history import KernelAttempt, attempt_from, with_history
from slime_kernels.turns.returns import ended_by, trajectory_return, turn_returns


def test_the_return_of_a_trajectory_by_hand():
    # 0 + 0.4 * 0.3 + 0.16 * 1.3 = 0.12 + 0.208
    assert trajectory_return([0.0, 0.3, 1.3], 0.4) == pytest.approx(0.328)


def test_the_returns_of_turns_by_hand():
    # R_2 = 1.3; R_1 = 0.3 + 0.4 * 1.3 = 0.82; R_0 = 0 + 0.4 * 0.82 = 0.328
    assert turn_returns([0.0, 0.3, 1.3], 0.4) == pytest.approx([0.328, 0.82, 1.3])
    assert turn_returns([], 0.4) == []


@pytest.mark.parametrize(
    ("rewards", "ended"),
    [
        ([], None),
        ([0.0], None),
        ([0.0, 0.0], "all_failed"),
        ([0.1, 0.0], None),
        ([1.3], "fast_enough"),
        ([1.29], None),
        ([0.0, 0.1, 0.3], "max_turns"),
        ([0.0, 0.1, 1.3], "fast_enough"),
    ],
)
def test_when_no_turn_follows(rewards, ended):
    assert ended_by(rewards, correct_reward=0.3, max_turns=3) == ended


def verdict(speedup=None, **kwargs):
    timing = None
    if speedup is not None:
        timing = Timing(
            source="cost-model", target="sm_90", runtime_us=2.0, baseline_us=2.0 * speedup, speedup=speedup
        )
    return Verdict(status=EvalStatus.CORRECT, gate="fast", timing=timing, **kwargs)


@pytest.mark.parametrize(
    ("one", "reward"),
    [
        (verdict(), 0.0),
        (verdict(compiled=True), 0.1),
        (verdict(compiled=True, correct=True), 0.3),
        (verdict(0.5, compiled=True, correct=True), 0.3),
        (verdict(1.5, compiled=True, correct=True), 0.8),
        (verdict(9.0, compiled=True, correct=True), 2.3),
    ],
)
def test_the_reward_by_hand(one, reward):
    assert RewardScale().reward(one) == pytest.approx(reward)


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("no code", None),
        ("", None),
        ("```python\n\n```", None),
        ("```python\na = 1\n```", "a = 1"),
        ("```python\na = 1\n```\nbetter:\n```python\na = 2\n```", "a = 2"),
        ("<think>```python\na = 1\n```</think>", None),
        ("<think>```python\na = 1\n```</think>```python\na = 3\n```", "a = 3"),
        ("```python\na = 4", "a = 4"),
    ],
)
def test_the_candidate_of_a_response(response, code):
    found = candidate_of(response)
    assert (found if found is None else found.strip()) == code


SKELETON = f"y = {ANSWER}\n"


@pytest.mark.parametrize(
    ("response", "code"),
    [
        ("tl.exp(x)", "y = tl.exp(x)\n"),
        ("tl.exp(x)<|im_end|>", "y = tl.exp(x)\n"),
        ("</think>\ntl.exp(x)\n<|im_end|>\n", "y = tl.exp(x)\n"),
        ("```python\ntl.exp(x)\n```<|im_end|>", "y = tl.exp(x)\n"),
        ("<|im_end|>", None),
    ],
)
def test_what_is_missing_in_a_skeleton_is_a_block_or_all_of_the_answer_but_its_end(response, code):
    assert candidate_of(response, SKELETON) == code


def test_an_attempt_survives_its_entry_and_a_verdict_its_envelope():
    attempt = KernelAttempt(turn=1, code="x", verdict=verdict(1.5, compiled=True, correct=True, reward=0.8))
    assert attempt_from(attempt.to_dict()) == attempt
    assert verdict_of(attempt.verdict.envelope()) == attempt.verdict
    entry = attempt.to_dict()
    assert (entry["turn_idx"], entry["reward"], entry["eval_result"]["speedup"]) == (1, 0.8, 1.5)


def test_a_prompt_with_history_has_each_attempt_and_what_to_do():
    failed = Verdict(status=EvalStatus.INCORRECT, gate="correct", compiled=True, message="3 of 4 numbers")
    text = with_history(
        "Do it.",
        [
            KernelAttempt(turn=0, code="a = 1", verdict=failed),
            KernelAttempt(turn=1, code="a = 2", verdict=verdict(1.5, compiled=True, correct=True)),
        ],
    )
    assert (
        text.index("Do it.")
        < text.index("Previous attempt 1")
        < text.index("a = 1")
        < text.index("Previous attempt 2")
    )
    assert "Error (incorrect): 3 of 4 numbers\nFix it." in text
    assert "Runtime: 2.0 us (cost-model)\nSpeedup: 1.50\nMake it faster." in text
