"""The generator: what is trained on, what each sample is rewarded with, and what ends a trajectory, with an engine that says given answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from slime_core.errors import SampleError
from slime_core.protocols import Completion, GenerateContext, SamplingParams
from slime_core.samples import Sample, Status
from slime_kernels.judge.verdict import EvalStatus, Timing, Verdict
from slime_kernels.problems.generated import generated_problems
from slime_kernels.problems.problem import PROBLEM_KEY, PROMPT_KEY
from slime_kernels.turns.kernel_turns import KernelTurnsSettings, Trajectory
from slime_kernels.turns.record import TURNS_KEY

EOS = 0
PROBLEM = generated_problems(1)[0][0]


class Bytes:
    """A tokenizer whose ids are bytes; 0 ends an answer."""

    eos_token_id = EOS

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: Any, *, skip_special_tokens: bool = True) -> str:
        ids = [one for one in map(int, tokens) if one or not skip_special_tokens]
        return bytes(ids).decode(errors="replace")

    def apply_chat_template(self, messages: list[dict[str, Any]], *, tools: Any = None, **_: Any) -> str:
        return "".join(f"<{m['role']}>{m['content']}\0\n" for m in messages) + "<assistant>"


class Says:
    """An engine that gives its answers in turn, and takes down what it was asked."""

    def __init__(self, *answers: str) -> None:
        self.answers, self.asked = list(answers), []

    async def generate(
        self, tokens: Any, params: SamplingParams, *, session_id: str | None = None
    ) -> Completion:
        self.asked.append(bytes(map(int, tokens)).decode())
        answer = self.answers.pop(0)
        if answer == "abort":
            return Completion(tokens=[], log_probs=[], finish_reason="abort", weight_version="1")
        ids = [*answer.encode(), EOS][: params.max_new_tokens]
        reason = "stop" if ids[-1] == EOS else "length"
        return Completion(tokens=ids, log_probs=[-0.5] * len(ids), finish_reason=reason, weight_version="1")


class Table:
    """A judge that knows the verdict of each candidate."""

    def __init__(self, **rewards: float) -> None:
        self.rewards, self.asked = rewards, []

    async def judge(self, problem: Any, source: str, *, backend: str = "triton") -> Verdict:
        name = source.strip()
        self.asked.append(name)
        reward = self.rewards[name]
        speedup = reward + 0.7
        timing = Timing(
            source="cost-model", target="sm_90", runtime_us=1.0, baseline_us=speedup, speedup=speedup
        )
        correct = reward >= 0.3
        return Verdict(
            status=EvalStatus.CORRECT if correct else EvalStatus.INCORRECT,
            gate="fast" if correct else "correct",
            compiled=reward > 0,
            correct=correct,
            timing=timing if correct else None,
            reward=reward,
        )


def code(name):
    return f"```python\n{name}\n```"


def sample(text="Do it."):
    rendered = f"<user>{text}\0\n<assistant>"
    made = {"text": text, "chat": True, "template_kwargs": {}}
    metadata = {PROBLEM_KEY: PROBLEM.to_dict(), PROMPT_KEY: made}
    return Sample(
        index=7, prompt=rendered, tokens=list(rendered.encode()), label=PROBLEM.code, metadata=metadata
    )


def play(engine, judge, *, one=None, max_new_tokens=400, max_context_len=None, **settings):
    ctx = GenerateContext(engine=engine, tokenizer=Bytes(), max_context_len=max_context_len)
    params = SamplingParams(max_new_tokens=max_new_tokens)
    return asyncio.run(
        Trajectory(ctx, one or sample(), params, KernelTurnsSettings(**settings), judge).play()
    )


@pytest.mark.parametrize("kind", ["trajectory", "turn"])
def test_a_prompt_that_leaves_no_room_is_a_truncated_sample_without_code(kind):
    result = play(Says(), Table(), max_context_len=20, kernel_samples=kind)
    (one,) = result if isinstance(result, list) else [result]
    assert (one.status, one.response_length, one.reward["score"]) == (Status.TRUNCATED, 0, 0.0)
    assert one.metadata[TURNS_KEY]["ended_by"] == "budget"


def test_a_chat_is_one_sample_whose_masks_are_the_policys_tokens():
    engine, judge = Says("no code", code("a"), code("b")), Table(a=0.1, b=0.3)
    result = play(engine, judge)
    trained = [one for one, kept in zip(result.response_tokens, result.loss_mask, strict=True) if kept]
    said = f"no code\0{code('a')}\0{code('b')}\0"
    assert bytes(map(int, trained)).decode() == said
    assert result.response_tokens[: len("no code\0\n<user>")] == list(b"no code\0\n<user>")
    logs = [one for one, kept in zip(result.rollout_log_probs, result.loss_mask, strict=True) if kept]
    assert set(logs) == {-0.5}
    assert result.reward["score"] == pytest.approx(0.0 + 0.4 * 0.1 + 0.16 * 0.3)
    assert (result.reward["turns"], result.reward["correct"]) == (3.0, 1.0)
    assert result.metadata[TURNS_KEY]["ended_by"] == "max_turns"
    assert result.metadata[TURNS_KEY]["turn_rewards"] == [0.0, 0.1, 0.3]
    result.check(vocab_size=256)
    assert judge.asked == ["a", "b"]
    assert engine.asked[1].startswith(engine.asked[0] + "no code\0\n<user>Compiled: no")


def test_turns_as_samples_have_their_own_prompts_and_returns():
    engine = Says(code("a"), code("b"), code("c"))
    results = play(engine, Table(a=0.1, b=0.3, c=0.3), kernel_samples="turn")
    assert [bytes(map(int, one.response_tokens)).decode() for one in results] == [
        code(name) + "\0" for name in "abc"
    ]
    assert [bytes(map(int, one.tokens[: one.prompt_length])).decode() for one in results] == engine.asked
    expected = [0.1 + 0.4 * (0.3 + 0.4 * 0.3), 0.3 + 0.4 * 0.3, 0.3]
    assert [one.reward["score"] for one in results] == pytest.approx(expected)
    assert [one.train_metadata["turn"] for one in results] == [0, 1, 2]
    assert {one.rollout_id for one in results} == {7}
    for one in results:
        one.check(vocab_size=256)


def test_a_prompt_with_history_begins_anew_each_turn():
    engine = Says(code("a"), code("b"))
    results = play(engine, Table(a=0.1, b=0.3), kernel_context="history", kernel_max_turns=2)
    assert engine.asked[1].startswith(
        "<user>Do it.\n\nPrevious attempt 1:\n\n```python\na\n```\n\nCompiled: yes"
    )
    assert engine.asked[1].endswith("Fix it.\0\n<assistant>")
    assert [one.reward["score"] for one in results] == pytest.approx([0.1 + 0.4 * 0.3] * 2)


@pytest.mark.parametrize(
    ("answers", "ended", "n"),
    [
        ([code("fast")], "fast_enough", 1),
        (["none", "none"], "all_failed", 2),
        ([code("a"), "none", code("a")], "max_turns", 3),
    ],
)
@pytest.mark.parametrize("samples", ["trajectory", "turn"])
def test_what_ends_a_trajectory(answers, ended, n, samples):
    engine = Says(*answers)
    result = play(engine, Table(fast=1.3, a=0.1), kernel_samples=samples)
    first = result[0] if samples == "turn" else result
    assert first.metadata[TURNS_KEY]["ended_by"] == ended
    assert len(engine.asked) == n


def test_a_budget_that_is_spent_truncates():
    result = play(Says("x" * 50), Table(), max_new_tokens=20)
    assert (result.status, result.generated_length) == (Status.TRUNCATED, 20)
    tight = play(Says("none"), Table(), max_context_len=40)
    assert tight.metadata[TURNS_KEY]["ended_by"] == "budget"
    assert len(tight.tokens) <= 40


def test_an_aborted_chat_goes_on_with_its_history():
    judge = Table(a=0.1, b=0.3)
    stopped = play(Says(code("a"), "abort"), judge, kernel_max_turns=2)
    assert stopped.status is Status.ABORTED
    result = play(Says(code("b")), judge, one=stopped, kernel_max_turns=2)
    assert result.metadata[TURNS_KEY]["turn_rewards"] == [0.1, 0.3]
    assert judge.asked == ["a", "b"]
    result.check(vocab_size=256)


def test_aborted_turns_of_their_own_begin_anew():
    one = sample()
    stopped = play(Says(code("a"), "abort"), Table(a=0.1), one=one, kernel_samples="turn")
    assert (stopped.status, stopped.response_length) == (Status.ABORTED, 0)


def test_logs_are_a_file_a_turn_and_one_of_the_trajectory(tmp_path):
    play(Says("none", code("b")), Table(b=0.3), kernel_max_turns=2, kernel_log_dir=str(tmp_path))
    names = sorted(path.name.rpartition("_")[0] for path in tmp_path.iterdir())
    stem = f"l{PROBLEM.level}p{PROBLEM.problem_id}_s7"
    assert names == [f"trajectory_{stem}", f"turn_{stem}_t0", f"turn_{stem}_t1"]


def test_a_sample_of_another_source_is_refused():
    with pytest.raises(SampleError, match="choose --data-source-path kernelbench"):
        play(Says(), Table(), one=Sample(index=1, tokens=[1], label="x"))
