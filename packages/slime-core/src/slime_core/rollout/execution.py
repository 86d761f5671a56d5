"""One execution of a generator, with checks of what it returns; errors name the generator and the sample."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from slime_core.errors import SampleError, SlimeError
from slime_core.protocols import GenerateContext, SamplingParams
from slime_core.protocols.rollout import renders_prompt
from slime_core.samples import Sample, Status
from slime_core.samples.validation import check_fields, check_numbers


@dataclass(frozen=True, kw_only=True)
class Generator:
    """A generator together with the checks of its results."""

    name: str
    """How messages call it."""
    function: Callable[..., Any]
    vocab_size: int | None
    """Token ids must be below it; None if it is not known."""
    max_context_len: int | None
    """Most tokens of prompt and response, of what is trained on."""
    engine_context_len: int | None = None
    """Most tokens of prompt and response that the engine takes; None if it does not say."""
    is_free: bool = False
    """Whether it may bring a prompt of its own, bounds its own length, and scores what it wants: the attribute `is_free` of a
    generator, True on what calls a function of another system whose generators do so."""

    async def execute(self, context: GenerateContext, sample: Sample, params: SamplingParams) -> list[Sample]:
        """Run the generator on one sample, and check the samples that it returns, but for `check_numbers`.

        Raises:
            SampleError: it raised something that is no error of slime's, or returned something that cannot be used; names
                the sample, the generator and the field. What it raised is the cause.
        """
        name, given = sample.name, _given(sample, prompt=not self.is_free)
        renders = self.is_free or renders_prompt(self.function)
        prompt_ids = None if renders else sample.tokens[: sample.prompt_length]
        result = await self._call(name, context, sample, params)
        samples = [result] if isinstance(result, Sample) else _several(self._who(name), result)
        try:
            for one in samples:
                self._check(name, one, given, prompt_ids if len(samples) == 1 and not self.is_free else None)
                self._check_length(one, params, context)
            check_siblings(samples)
        except SampleError as error:
            error.add_note(f"returned by the generator {self.name} for {name}")
            raise
        return samples

    def check_numbers(self, samples: Sequence[Sample]) -> None:
        """Check ids and log-probs of finished executions, all at once: what `execute` leaves out.

        Raises:
            SampleError: names the sample and the field.
        """
        try:
            check_numbers(samples, vocab_size=self.vocab_size)
        except SampleError as error:
            error.add_note(f"returned by the generator {self.name}")
            raise

    def check_executions(self, samples: Sequence[Sample]) -> None:
        """Check that samples of a group that share a `rollout_id` are of one execution: others would count as one, too.

        Raises:
            SampleError: names the two samples and the generator.
        """
        first: dict[int, Sample] = {}
        for sample in samples:
            if sample.rollout_id is None:
                continue
            other = first.setdefault(sample.rollout_id, sample)
            if other.index != sample.index:
                raise SampleError(
                    f"{sample.name}: its rollout_id, {sample.rollout_id}, is that of {other.name}, too; only samples that one "
                    f"execution of the generator {self.name} returns share it (sample.rollout_id = sample.index)"
                )

    def _who(self, name: str) -> str:
        """Return how messages call the execution for a sample."""
        return f"{name}: the generator {self.name}"

    async def _call(self, name: str, context: GenerateContext, sample: Sample, params: SamplingParams) -> Any:
        task = asyncio.current_task()
        try:
            running = self.function(self._bounded(context), sample, params)
            if not (inspect.iscoroutine(running) or inspect.isawaitable(running)):
                raise SampleError(
                    f"{self._who(name)} is not async: it returned {type(running).__name__}; declare it with `async def`, and return "
                    "the Sample"
                )
            return await running
        except SlimeError as error:
            error.add_note(f"{self._who(name)} was at work")
            raise
        except asyncio.CancelledError as error:
            if task is not None and task.cancelling():
                raise
            told = f"{self._who(name)} raised CancelledError, and nobody had cancelled it"
            raise SampleError(told) from error
        except GeneratorExit as error:
            if not _runs(task):  # the coroutine is closed, by whoever forgets it
                raise
            raise SampleError(f"{self._who(name)} raised GeneratorExit") from error
        except BaseException as error:  # sys.exit() in a generator must not end the run as if it were done
            raise SampleError(f"{self._who(name)} raised {_told(error)}") from error

    def _bounded(self, context: GenerateContext) -> GenerateContext:
        """Return the context with the bound on prompt and response: the run's or the evaluation's own, and the engine's."""
        if self.max_context_len is None and self.engine_context_len is None:
            return context
        bounds = [bound for bound in (self._most(context), self.engine_context_len) if bound is not None]
        return dataclasses.replace(context, max_context_len=min(bounds, default=None))

    def _most(self, context: GenerateContext | None) -> int | None:
        """Return the most tokens of prompt and response by the settings: an evaluation comes with its own bound."""
        if context is None or not context.evaluation:
            return self.max_context_len
        return context.max_context_len

    def _check(
        self,
        name: str,
        sample: Sample,
        given: Sequence[tuple[str, Any]],
        prompt_ids: Sequence[int] | None,
    ) -> None:
        """Check one sample that came back.

        Args:
            name: of the one that was given.
            sample: that came back.
            given: fields that it was given and that are not to change, with their values.
            prompt_ids: that it was given; None where it has a prompt of its own.
        """
        for field, before in given:
            now = getattr(sample, field)
            if now is not before and (type(now) is not type(before) or now != before):
                raise SampleError(
                    f"{name}: {field} was {_short(before)} and came back as {_short(now)}; a generator leaves it as it is"
                )
        check_fields(sample, vocab_size=self.vocab_size, compact=False)
        if sample.status is Status.PENDING:
            raise SampleError(
                f"{name}: came back pending; set its status, as append_response does by finish_reason"
            )
        if sample.status is Status.FAILED and not sample.failure:
            raise SampleError(f"{name}: came back failed without a reason; say in `failure` why")
        if prompt_ids and sample.tokens[: sample.prompt_length] != prompt_ids:
            raise SampleError(
                f"{name}: its {len(prompt_ids)} prompt ids came back as {sample.prompt_length} others; a generator appends to "
                "`tokens`, and counts in `response_length` what it appends"
            )

    def _check_length(self, sample: Sample, params: SamplingParams, context: GenerateContext | None) -> None:
        n, most = len(sample.tokens), self._most(context)
        if most is not None and n > most:
            flag = "eval" if context is not None and context.evaluation else "rollout"
            raise SampleError(
                f"{sample.name}: came back with {n} tokens; wanted at most {flag}_max_context_len, {most}"
            )
        if not self.is_free and sample.generated_length > params.max_new_tokens:
            raise SampleError(
                f"{sample.name}: came back with a response of {sample.generated_length} tokens; wanted at most "
                f"{params.max_new_tokens}, its max_new_tokens; those of an environment are not counted"
            )


def _given(sample: Sample, *, prompt: bool) -> list[tuple[str, Any]]:
    """Return the fields that a generator may not change, as they are now: its numbers and, if it says so, its `prompt`."""
    fixed: list[tuple[str, Any]] = [("index", sample.index), ("group_index", sample.group_index)]
    if prompt and (
        sample.prompt or sample.tokens
    ):  # a sample without a prompt waits for one (`--disable-rollout-global-dataset`)
        text = sample.prompt
        fixed.append(("prompt", copy.deepcopy(text) if isinstance(text, list) else text))
        fixed.append(("label", sample.label))
    return fixed


def _several(who: str, returned: Any) -> list[Sample]:
    """Return what a generator returned if it is a list of Samples; raises SampleError where it is not."""
    if not isinstance(returned, list) or not all(isinstance(one, Sample) for one in returned):
        found = [type(one).__name__ for one in returned] if isinstance(returned, list) else []
        shown = f"a list of {sorted(set(found))}" if found else type(returned).__name__
        raise SampleError(f"{who} returned {shown}; wanted its Sample, or a list of Samples")
    if not returned:
        raise SampleError(f"{who} returned a list of nothing; wanted its Sample, or a list of Samples")
    if len({id(one) for one in returned}) < len(returned):
        raise SampleError(f"{who} returned one Sample several times; wanted another one for each")
    return returned


def check_siblings(samples: list[Sample]) -> None:
    """Check that all samples of one execution have the same `rollout_id`.

    Raises:
        SampleError: their `rollout_id` or `index` differ, or several have no `rollout_id`.
    """
    if len(samples) < 2:
        return
    ids = {sample.rollout_id for sample in samples}
    if len(ids) > 1 or None in ids:
        raise SampleError(
            f"{samples[0].name}: one execution returned {len(samples)} samples with rollout_ids {sorted(map(str, ids))}; "
            "a generator that fans out must give all of them the same rollout_id"
        )


def check_groups(groups: Any, step: int, *, vocab_size: int | None) -> None:
    """Check that a rollout function returned a list of groups of valid samples.

    Raises:
        SampleError: names the step, and the sample if it is one.
    """
    who = f"step {step}: the rollout function (--rollout-function-path)"
    if not isinstance(groups, list) or not all(isinstance(group, list) and group for group in groups):
        found = (
            [type(group).__name__ for group in groups] if isinstance(groups, list) else type(groups).__name__
        )
        raise SampleError(
            f"{who} returned {str(found)[:60]}; wanted a list of groups, each a list of Samples"
        )
    for sample in (sample for group in groups for sample in group):
        if not isinstance(sample, Sample):
            raise SampleError(f"{who} returned {type(sample).__name__} in a group; wanted Samples")
        try:
            sample.check(vocab_size=vocab_size)
        except SampleError as error:
            error.add_note(f"returned by {who}")
            raise


def _runs(task: asyncio.Task[Any] | None) -> bool:
    """Return whether `task` is what its event loop executes now."""
    try:
        return task is not None and asyncio.current_task() is task
    except RuntimeError:  # no event loop runs
        return False


def _told(error: BaseException) -> str:
    try:
        text = str(error)
    except Exception:
        text = "an error without a text"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _short(value: Any) -> str:
    try:
        return repr(value)[:60]
    except Exception:
        return f"a {type(value).__name__} without a repr"
