"""`RolloutHooks`: functions of a user's own that see the buffer, the samples and the groups of a rollout, and checks of what they do."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from slime_core.config.functions import resolve_function, resolve_plain
from slime_core.config.settings import Settings
from slime_core.errors import PluginError, SampleError, SlimeError
from slime_core.plugins.registry import Registry
from slime_core.protocols import Metrics
from slime_core.rollout.given_metrics import given_metrics
from slime_core.runtime.closing import close_part
from slime_core.samples import Group, Sample, Status

#: Entry-point group of the functions.
GROUP = "slime.rollout_hooks"
#: Reason of a group that the buffer filter took out of the buffer and did not return.
BUFFER_FILTER = "buffer_filter"
#: Reason of a group that the function of `--rollout-all-samples-process-path` took from the data source.
TAKEN_BY_HOOK = "taken_by_hook"
#: Key of a sample's metadata: why `--rollout-sample-filter-path` does not train on it.
REMOVED = "removed_reason"
#: Key of a sample's metadata: the filter's reason to drop its group, which was kept because too few were left.
KEPT_DESPITE = "kept_despite"
#: Fields of a sample that a sample hook leaves as they are.
_GIVEN = ("index", "group_index", "rollout_id")


@dataclass(frozen=True, kw_only=True)
class RolloutHooks:
    """The chosen functions, in the reference system's signatures; the first argument, `args` there, is the run's settings."""

    settings: Settings | None = None
    """What the functions get as `args`."""
    buffer_filter: Callable[..., list[Group]] | None = None
    """`(args, rollout_id, buffer, num_samples) -> groups`: which groups that wait are generated next."""
    sample_hooks: Sequence[tuple[str, Callable[..., Any]]] = ()
    """(How messages call it, `(args, sample, *, rollout_id, evaluation) -> Sample | None`), one after the other. One that is
    a class is built from its options, and called."""
    sample_filter: Callable[..., None] | None = None
    """`(args, groups) -> None`: sets `remove_sample`."""
    all_samples: Callable[..., None] | None = None
    """`(args, all_groups, get_samples) -> None`: sees kept and dropped groups."""
    convert: Callable[..., Any] | None = None
    """`(args, samples) -> dict of lists`: makes the training data; see `data.conversion.converted`."""
    rollout_log: Callable[..., bool] | None = None
    """`(rollout_id, args, samples, metrics, rollout_time) -> bool`; what it adds to `metrics` is logged in any case."""
    eval_log: Callable[..., bool] | None = None
    """`(rollout_id, args, data, metrics) -> bool`; what it adds to `metrics` is logged in any case."""

    def chosen_from(
        self, waiting: list[Group], n_groups: int
    ) -> tuple[list[Group], list[Group], list[Group]]:
        """Ask the buffer filter which of the groups that wait are generated next.

        Args:
            waiting: all groups of the buffer, in its order.
            n_groups: most groups that may be chosen.

        Returns:
            The groups to generate, those that go back to the buffer, and those that the filter dropped: it took them out of
            the list and did not return them.

        Raises:
            SampleError: it raised, or returned something else than groups of the list that it took out of it.
        """
        assert self.buffer_filter is not None
        who, rest = "the buffer filter (--buffer-filter-path)", list(waiting)
        answer = _called(who, self.buffer_filter, self.settings, None, rest, n_groups)
        known, left = {id(group) for group in waiting}, {id(group) for group in rest}
        if not isinstance(answer, list) or any(id(group) not in known for group in [*answer, *rest]):
            raise SampleError(f"{who} returned {_kind(answer)}; wanted a list of groups of the buffer")
        chosen = {id(group) for group in answer}
        if len(chosen) < len(answer) or len(left) < len(rest) or len(answer) > n_groups or chosen & left:
            raise SampleError(
                f"{who} returned {len(answer)} groups, {len(chosen & left)} of which it left in the buffer; wanted at most "
                f"{n_groups}, each once, which it takes out of the buffer"
            )
        return answer, rest, [group for group in waiting if id(group) not in chosen | left]

    async def finish(self, sample: Sample, *, rollout_id: int | None, evaluation: bool) -> Sample:
        """Let the sample hooks have a sample that was generated and is not scored yet; returns the one to go on with.

        Raises:
            SampleError: a hook raised, or returned what is no sample, or another one.
        """
        for name, hook in self.sample_hooks:
            who = f"{sample.name}: the sample hook {name}"
            given = {field: getattr(sample, field) for field in _GIVEN}
            answer = _called(who, hook, self.settings, sample, rollout_id=rollout_id, evaluation=evaluation)
            if inspect.isawaitable(answer):
                answer = await _awaited(who, answer)
            if answer is not None and not isinstance(answer, Sample):
                raise SampleError(
                    f"{who} returned {_kind(answer)}; wanted a Sample, or None for the same one"
                )
            sample = answer or sample
            for field, before in given.items():
                if (now := getattr(sample, field)) != before:
                    raise SampleError(
                        f"{who}: {field} was {before} and came back as {now}; leave it as it is"
                    )
        return sample

    async def close(self) -> None:
        """Close the sample hooks that have connections or files open: those with a method `close()`, `async` or not."""
        for _, hook in self.sample_hooks:
            await close_part(hook)

    def filter_samples(self, groups: list[Group]) -> None:
        """Let the sample filter choose samples of a step that are not trained on, and note why in their metadata.

        Raises:
            SampleError: it raised, or changed which samples there are.
        """
        if self.sample_filter is None:
            return
        who = "the sample filter (--rollout-sample-filter-path)"
        before = [[id(sample) for sample in group] for group in groups]
        removed = {id(sample) for group in groups for sample in group if sample.remove_sample}
        _called(who, self.sample_filter, self.settings, groups)
        if [[id(sample) for sample in group] for group in groups] != before:
            raise SampleError(f"{who} changed the groups; wanted `remove_sample` set on their samples alone")
        for sample in (sample for group in groups for sample in group):
            if sample.remove_sample and id(sample) not in removed:
                sample.metadata.setdefault(REMOVED, "sample_filter")

    def see_all(
        self, kept: Sequence[Group], dropped: Sequence[Group], get_samples: Callable[[int], list[Group]]
    ) -> None:
        """Show all groups of a step, in the order of their prompts; raises as `filter_samples` does."""
        if self.all_samples is None:
            return
        groups = sorted([*kept, *dropped], key=lambda group: group[0].index or 0)
        who = "the function of --rollout-all-samples-process-path"
        _called(who, self.all_samples, self.settings, groups, get_samples)

    def logs_rollout(
        self, step: int, groups: Sequence[Group], metrics: Metrics, rollout_s: float
    ) -> tuple[bool, Metrics]:
        """Show samples and metrics of a step; returns whether the function logs in the place of the trackers, and what it added.

        Raises:
            PluginError: it added what is no number.
            SampleError: it raised.
        """
        if self.rollout_log is None:
            return False, {}
        samples, shown = [sample for group in groups for sample in group], dict(metrics)
        who = "the function of --custom-rollout-log-function-path"
        answer = _called(who, self.rollout_log, step - 1, self.settings, samples, shown, rollout_s)
        return bool(answer), _added(who, shown, metrics)

    def logs_evaluation(
        self, step: int, by_name: Mapping[str, Sequence[Group]], metrics: Metrics, *, reward_key: str | None
    ) -> tuple[bool, Metrics]:
        """Show samples and metrics of an evaluation; returns what `logs_rollout` does.

        Its `data` is evaluation set -> `rewards`, whether each sample was `truncated`, and the `samples`.

        Args:
            step: after which it was made.
            by_name: evaluation set -> its groups.
            metrics: of the evaluation.
            reward_key: which part of a reward counts; None where a reward is a number.
        """
        if self.eval_log is None:
            return False, {}
        sets = {name: [sample for group in groups for sample in group] for name, groups in by_name.items()}
        data = {
            name: {
                "rewards": [sample.reward_value(reward_key) for sample in samples],
                "truncated": [sample.status is Status.TRUNCATED for sample in samples],
                "samples": samples,
            }
            for name, samples in sets.items()
        }
        who = "the function of --custom-eval-rollout-log-function-path"
        shown = dict(metrics)
        answer = _called(who, self.eval_log, max(0, step - 1), self.settings, data, shown)
        return bool(answer), _added(who, shown, metrics)


def resolve_rollout_hooks(settings: Settings, registry: Registry) -> RolloutHooks:
    """Return the functions that settings choose, each with its options of `hook_args`.

    Raises:
        PluginError: one is not found, is no function, or does not take its options.
    """
    section = settings.rollout

    def resolve(reference: str | None, flag: str) -> Callable[..., Any] | None:
        if reference is None:
            return None
        return with_options(reference, flag)

    def with_options(reference: str, flag: str) -> Callable[..., Any]:
        explicit, where = section.hook_args.get(reference, {}), f"rollout.hook_args.{reference}"
        return resolve_function(
            settings, registry, GROUP, reference, where=where, explicit=explicit, flag=flag
        )

    def sample_hook(name: str) -> Callable[..., Any]:
        flag = "--rollout-sample-hook-path"
        found = resolve_plain(settings, registry, GROUP, name, flag=flag)
        if inspect.isclass(found):
            built: Callable[..., Any] = with_options(name, flag)()
            return built
        if name in section.hook_args:
            raise PluginError(
                f"rollout.hook_args.{name}: found options; a sample hook that is a function takes none, only a class does"
            )
        return found

    return RolloutHooks(
        settings=settings,
        buffer_filter=resolve(section.buffer_filter_path, "--buffer-filter-path"),
        sample_hooks=[(name, sample_hook(name)) for name in section.rollout_sample_hook_path],
        sample_filter=resolve(section.rollout_sample_filter_path, "--rollout-sample-filter-path"),
        convert=resolve(
            section.custom_convert_samples_to_train_data_path, "--custom-convert-samples-to-train-data-path"
        ),
        all_samples=resolve(section.rollout_all_samples_process_path, "--rollout-all-samples-process-path"),
        rollout_log=resolve(section.custom_rollout_log_function_path, "--custom-rollout-log-function-path"),
        eval_log=resolve(
            section.custom_eval_rollout_log_function_path, "--custom-eval-rollout-log-function-path"
        ),
    )


def pop_first(args: Settings, rollout_id: int | None, buffer: list[Group], num_samples: int) -> list[Group]:
    """Take the groups that come first in the buffer: what is done without a buffer filter."""
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


def _added(who: str, shown: Metrics, metrics: Metrics) -> Metrics:
    """Return what a function that was shown metrics has added to them; raises PluginError for what is no number."""
    return given_metrics({name: value for name, value in shown.items() if name not in metrics}, who=who)


def _called(who: str, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    """Call a user's function; whatever it raises that is no error of slime's becomes one that says whose it is."""
    try:
        return function(*arguments, **named)
    except (SlimeError, GeneratorExit):
        raise
    except BaseException as error:
        raise SampleError(f"{who} raised {type(error).__name__}: {error}") from error


async def _awaited(who: str, answer: Any) -> Any:
    try:
        return await answer
    except SlimeError:
        raise
    except Exception as error:
        raise SampleError(f"{who} raised {type(error).__name__}: {error}") from error


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:60]!r}"
