"""The generator `kernel-turns`: up to so many attempts at a kernel, each told what became of those before."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from slime_core.errors import SampleError
from slime_core.protocols import GenerateContext, SamplingParams
from slime_core.samples import Sample, Status

from slime_kernels.judge.judging import Judges, judge_of, judged
from slime_kernels.problems.problem import PROBLEM_KEY, PROMPT_KEY, KernelProblem, problem_from
from slime_kernels.section import KernelsSection, TurnsSection
from slime_kernels.turns.extraction import candidate_of
from slime_kernels.turns.history import KernelAttempt, attempt_from, feedback, no_code, with_history
from slime_kernels.turns.logs import log_trajectory, log_turn
from slime_kernels.turns.record import TURNS_KEY
from slime_kernels.turns.rendering import opening, reply
from slime_kernels.turns.returns import MAX_TURNS, ended_by, trajectory_return, turn_returns

BUDGET = "budget"


class KernelTurnsSettings(KernelsSection, TurnsSection):
    """Options of `kernel-turns`: how candidates are evaluated, and the turns."""


async def kernel_turns(
    ctx: GenerateContext, sample: Sample, params: SamplingParams, *, settings: KernelTurnsSettings
) -> Sample | list[Sample]:
    """Let the policy try a problem until its kernel is fast, two attempts and all before have failed, or a budget is spent.

    The problem comes from the sources `kernelbench` or `kernel-problems`. Of a response its last fenced block of Python is the
    candidate; a response without any is an attempt that failed. What the policy is told is not trained on.

    With `kernel_context = "chat"` and `kernel_samples = "trajectory"` all turns are one sample, rewarded by sum of gamma^t r_t.
    Otherwise each turn is a sample of its own, with the prompt that it was generated from, and all share a `rollout_id`; they are
    rewarded by that sum, or with `kernel_samples = "turn"` each by the rewards from its turn on.

    Raises:
        SampleError: the sample is of another source.
        RewardError: its problem could not be evaluated.
    """
    return await Trajectory(ctx, sample, params, settings, judge_of(settings)).play()


class Trajectory:
    """One sample's attempts.

    Args:
        ctx: of the run.
        sample: the problem.
        params: of a response.
        settings: of the turns.
        judge: decides about candidates.
    """

    def __init__(
        self,
        ctx: GenerateContext,
        sample: Sample,
        params: SamplingParams,
        settings: KernelTurnsSettings,
        judge: Judges,
    ) -> None:
        if PROBLEM_KEY not in sample.metadata or PROMPT_KEY not in sample.metadata:
            raise SampleError(
                f"{sample.name}: metadata has no {PROBLEM_KEY!r}; choose --data-source-path kernelbench or kernel-problems"
            )
        self._ctx, self._sample, self._params = ctx, sample, params
        self._settings, self._judge = settings, judge
        self._problem: KernelProblem = problem_from(sample.metadata[PROBLEM_KEY])
        self._made: dict[str, Any] = sample.metadata[PROMPT_KEY]
        self._attempts: list[KernelAttempt] = []
        self._folder = None if settings.kernel_log_dir is None else Path(settings.kernel_log_dir)

    async def play(self) -> Sample | list[Sample]:
        """Return the sample, or one for each turn."""
        settings = self._settings
        if settings.kernel_context == "chat" and settings.kernel_samples == "trajectory":
            return await self._in_one()
        return await self._in_several()

    async def _in_one(self) -> Sample:
        sample, record = self._sample, self._sample.metadata.get(TURNS_KEY)
        if sample.response_length and record is not None:
            self._attempts = [attempt_from(entry) for entry in record["history"]]
        ended = None
        while ended is None:
            if self._ctx.remaining(sample, self._params).max_new_tokens < 1:
                ended = BUDGET
                break
            text = await self._ctx.turn(sample, self._params)
            if sample.status is Status.ABORTED:
                self._note(sample, "aborted")
                return sample
            ended = await self._attempt(sample, text)
            if sample.status is Status.TRUNCATED:
                ended = ended or BUDGET
            if ended is None and not self._say(sample, self._feedback()):
                ended = BUDGET
        if not self._attempts:
            self._had_no_turn(sample)
        if ended in (MAX_TURNS, BUDGET) and not self._attempts[-1].verdict.correct:
            sample.status = Status.TRUNCATED
        self._finish([sample], ended)
        return sample

    async def _in_several(self) -> list[Sample] | Sample:
        blank, samples = copy.deepcopy(self._sample), list[Sample]()
        blank.tokens, blank.response, blank.response_length = blank.tokens[: blank.prompt_length], "", 0
        ended = None
        while ended is None:
            sample = copy.deepcopy(blank)
            sample.tokens = self._prompt(samples, blank)
            if self._ctx.remaining(sample, self._params).max_new_tokens < 1:
                ended = BUDGET
                break
            text = await self._ctx.turn(sample, self._params)
            if sample.status is Status.ABORTED:
                self._sample.status = Status.ABORTED  # it begins anew
                return self._sample
            samples.append(sample)
            ended = await self._attempt(sample, text)
        if not samples:
            self._had_no_turn(self._sample)
            samples = [self._sample]
        self._finish(samples, ended)
        for one in samples:
            one.rollout_id = self._sample.index
        return samples

    def _had_no_turn(self, sample: Sample) -> None:
        """Give a sample whose prompt left no room for a response an empty one, without code."""
        sample.append_response([], finish_reason="length")
        self._attempts = [KernelAttempt(turn=0, code=None, verdict=no_code())]

    def _prompt(self, samples: list[Sample], blank: Sample) -> list[int]:
        """Return the prompt ids of the next turn."""
        if not samples:
            return list(blank.tokens)
        tokenizer = self._ctx.tokenizer
        if self._settings.kernel_context == "history":
            return opening(tokenizer, self._made, with_history(self._made["text"], self._attempts))
        before = [int(one) for one in samples[-1].tokens]
        return before + tokenizer.encode(reply(tokenizer, self._made, self._feedback(), before))

    def _feedback(self) -> str:
        return feedback(self._attempts[-1], skeleton=bool(self._problem.skeleton))

    async def _attempt(self, sample: Sample, text: str) -> str | None:
        """Have a response evaluated; returns why no turn follows it."""
        code, verdict = candidate_of(text, self._problem.skeleton), no_code()
        if code is not None:
            with self._ctx.outside_engine(sample):
                verdict = await judged(self._judge, self._problem, code)
        attempt = KernelAttempt(turn=len(self._attempts), code=code, verdict=verdict)
        self._attempts.append(attempt)
        log_turn(self._folder, self._instance, attempt)
        return ended_by(
            [one.verdict.reward for one in self._attempts],
            correct_reward=self._settings.correct_reward,
            max_turns=self._settings.kernel_max_turns,
        )

    def _say(self, sample: Sample, text: str) -> bool:
        """Append what the policy is told; returns whether there was room for it."""
        tokenizer = self._ctx.tokenizer
        said = reply(tokenizer, self._made, text, sample.tokens)
        ids, most = tokenizer.encode(said), self._ctx.max_context_len
        if most is not None and len(sample.tokens) + len(ids) >= most:
            return False
        self._ctx.append(sample, ids, text=said)
        return True

    def _finish(self, samples: list[Sample], ended: str) -> None:
        """Reward the samples, and write the record into them."""
        rewards, gamma = [one.verdict.reward for one in self._attempts], self._settings.multi_turn_gamma
        whole = trajectory_return(rewards, gamma)
        if self._settings.kernel_samples == "turn":
            values = turn_returns(rewards, gamma)
        else:
            values = [whole] * len(samples)
        for turn, (sample, value) in enumerate(zip(samples, values, strict=True)):
            best = max(self._attempts, key=_rank) if len(samples) == 1 else self._attempts[turn]
            sample.reward = {
                "score": value,
                "compiled": float(best.verdict.compiled),
                "correct": float(best.verdict.correct),
                "speedup": best.verdict.speedup,
                "turns": float(len(self._attempts)),
            }
            sample.train_metadata = {**(sample.train_metadata or {}), "turn": turn if len(samples) > 1 else 0}
            self._note(sample, ended)
        log_trajectory(self._folder, self._instance, self._attempts, ended_by=ended, value=whole)

    def _note(self, sample: Sample, ended: str) -> None:
        record = {
            "history": [one.to_dict() for one in self._attempts],
            "turn_rewards": [one.verdict.reward for one in self._attempts],
            "ended_by": ended,
        }
        sample.metadata = {**sample.metadata, TURNS_KEY: record}

    @property
    def _instance(self) -> str:
        """The name of the trajectory in logs."""
        return f"l{self._problem.level}p{self._problem.problem_id}_s{self._sample.index}"


def _rank(attempt: KernelAttempt) -> tuple[bool, bool, float]:
    """Return how far an attempt came."""
    return attempt.verdict.correct, attempt.verdict.compiled, attempt.verdict.reward
