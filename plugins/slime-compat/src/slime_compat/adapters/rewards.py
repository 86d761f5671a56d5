"""Rewards and their post-processing as the reference system calls them."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slime_core.errors import PluginError
from slime_core.rewards.results import SCORE, Failed, plain_value
from slime_core.samples import Group, Sample

from slime_compat.adapters.calling import Theirs
from slime_compat.views.samples.sample import ANSWER, viewed

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class ReferenceReward:
    """Calls `async fn(args, sample)` on the event loop; it is given the sample itself, as there, and may write to it.

    Args:
        path: `module:attribute`.
        run_args: settings of the run.
    """

    #: What it writes to the sample stays.
    writes = True

    def __init__(self, *, path: str, run_args: Mapping[str, Any] | None = None) -> None:
        self._theirs = Theirs("slime.rewards", path, run_args)
        _refuse_plural(self._theirs)

    async def __call__(self, sample: Sample) -> Any:
        """Score one sample."""
        return _numbered(
            self._theirs.args, sample, await self._theirs.function(self._theirs.args, viewed(sample))
        )


class ReferenceRewardSync:
    """Calls `fn(args, sample)`, which is not async, in a worker process. Args as `ReferenceReward`."""

    def __init__(self, *, path: str, run_args: Mapping[str, Any] | None = None) -> None:
        self._theirs = Theirs("slime.rewards", path, run_args)
        _refuse_plural(self._theirs)

    def __call__(self, sample: Sample) -> Any:
        """Score one sample."""
        return self._theirs.function(self._theirs.args, viewed(sample))


class ReferenceGroupReward:
    """Calls `async fn(args, samples)` on the event loop. Args as `ReferenceReward`."""

    #: What it writes to the samples stays.
    writes = True

    def __init__(self, *, path: str, run_args: Mapping[str, Any] | None = None) -> None:
        self._theirs = Theirs("slime.group_rewards", path, run_args)

    async def __call__(self, group: Group) -> Any:
        """Score a group, in order."""
        return await self._theirs.function(self._theirs.args, [viewed(sample) for sample in group])


class ReferenceGroupRewardSync:
    """Calls `fn(args, samples)`, which is not async, in a worker process. Args as `ReferenceReward`."""

    def __init__(self, *, path: str, run_args: Mapping[str, Any] | None = None) -> None:
        self._theirs = Theirs("slime.group_rewards", path, run_args)

    def __call__(self, group: Group) -> Any:
        """Score a group, in order."""
        return self._theirs.function(self._theirs.args, [viewed(sample) for sample in group])


class ReferencePostProcess:
    """Calls `fn(args, samples) -> (raw_rewards, rewards)` as a reward transform; `rewards` are credited.

    Raw rewards stay those that were scored; of a reward without a number of its own, which the function alone can read, 0.

    Args:
        path: `module:attribute`.
        run_args: settings of the run.
    """

    def __init__(self, *, path: str, run_args: Mapping[str, Any] | None = None) -> None:
        self._theirs = Theirs("slime.reward_transforms", path, run_args)
        self._credited: NDArray[np.float64] | None = None

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Call the function with the samples of a step.

        Raises:
            PluginError: it returned something else than two lists of a number for each sample.
        """
        held = [sample.reward for sample in samples]
        for sample in samples:
            sample.reward = sample.metadata.get(ANSWER, sample.reward)
            sample.metadata = {name: value for name, value in sample.metadata.items() if name != ANSWER}
        answer = self._theirs.function(self._theirs.args, [viewed(sample) for sample in samples])
        if not isinstance(answer, tuple | list) or len(answer) != 2:
            raise self._theirs.refuse(answer)
        _, self._credited = (self._numbers(each, len(samples)) for each in answer)
        for sample, reward in zip(samples, held, strict=True):
            sample.reward = reward
            teacher: Any = sample.teacher_log_probs
            if hasattr(teacher, "tolist"):
                sample.teacher_log_probs = teacher.tolist()

    def __call__(
        self, raw_rewards_N: NDArray[np.float64], group_ids_N: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """Return the credited rewards."""
        assert self._credited is not None
        return self._credited

    def _numbers(self, rewards: Any, count: int) -> NDArray[np.float64]:
        import numpy as np

        try:
            numbers = np.asarray([float(one) for one in rewards], dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise self._theirs.refuse(rewards) from error
        if len(numbers) != count:
            raise self._theirs.refuse(rewards)
        return numbers


def _numbered(args: Any, sample: Sample, answer: Any) -> Any:
    """Return a reward; one without a number is kept for the post-processing, which alone can read it, and 0 stands for it."""
    key = args.reward_key or SCORE
    if args.custom_reward_post_process_path is None or not isinstance(answer, Mapping):
        return answer
    plain = plain_value(answer)
    if isinstance(plain, Failed):
        return answer  # which is refused for the same reason
    if isinstance(plain, Mapping) and isinstance(plain.get(key), int | float):
        return answer
    sample.metadata = {**sample.metadata, ANSWER: plain}
    return 0.0 if args.reward_key is None else {key: 0.0}


def _refuse_plural(theirs: Theirs) -> None:
    """Refuse a function for whole groups where single samples are scored.

    Raises:
        PluginError: its second parameter is called `samples`.
    """
    if list(inspect.signature(theirs.function).parameters)[1:2] == ["samples"]:
        raise PluginError(
            f"{theirs.who}: takes a list of samples; wanted --group-rm, which scores groups at once, or a function (args, sample)"
        )
