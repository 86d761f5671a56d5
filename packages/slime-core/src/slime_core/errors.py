"""Every error that slime raises on purpose, and `Problem`, the unit in which settings are refused.

Each class also inherits the standard-library exception that it refines, carries one message string, and
survives pickling, because most of them cross a process before anybody reads them.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass

#: How the note begins that says where the traceback of an error is that no part of slime raised.
TRACEBACK = "traceback: "


class SlimeError(Exception):
    """Root of all errors that slime raises on purpose."""


class PluginError(SlimeError, LookupError):
    """A plugin cannot be found, is ambiguous, fails to import, or breaks its contract."""


class ContractError(SlimeError, AssertionError):
    """A plugin breaks a promise of its kind; the kits of `slime_core.testing.contracts` raise it."""


class DataError(SlimeError, ValueError):
    """A data file, a row of it, or a prompt is not what its settings say."""


class SampleError(SlimeError, ValueError):
    """A sample breaks an invariant; the message names its index."""


class RewardError(SlimeError, RuntimeError):
    """A reward raised, crashed its worker, missed its deadline, or returned something unusable."""


class EnvironmentFailure(SlimeError, RuntimeError):
    """An environment raised, missed its deadline, or answered something unusable; the message names sample and environment."""


class EngineError(SlimeError, RuntimeError):
    """A rollout engine cannot do what it was asked."""


class TrainerError(SlimeError, RuntimeError):
    """A trainer cannot do what it was asked."""


class WeightSyncError(SlimeError, RuntimeError):
    """Weights could not be moved, or the engine's weights are not the trainer's."""


class DeltaBaseError(WeightSyncError):
    """Changes do not fit the weights that the engine keeps to apply them to; all weights would."""


class ReceiverLostError(WeightSyncError):
    """A receiver was lost during an update that nobody stages; those that are left, or come, take it again."""


class CheckpointError(SlimeError, OSError):
    """A checkpoint cannot be written, or cannot be read back into this run."""


class DeadlineError(SlimeError, TimeoutError):
    """A remote call did not answer in time."""


class RolloutTimeout(DeadlineError):
    """A rollout or an evaluation was not done in time."""


class RunError(SlimeError, RuntimeError):
    """A run was ended by something that is no error by itself, such as `sys.exit()` in a plugin."""


class Interrupted(SlimeError, RuntimeError):
    """A signal asked the command to end."""

    def __init__(self, number: int) -> None:
        self.number = number
        super().__init__(f"{signal.Signals(number).name}; the same command resumes from the last checkpoint")

    def __reduce__(self) -> tuple[type[Interrupted], tuple[int]]:
        """Pickle by the signal, from which the message is rebuilt."""
        return type(self), (self.number,)


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with the settings.

    `where` names the file and key or the flag, `found` the value, `wanted` what would be right, and `todo`
    (optional) what to do about it.
    """

    where: str
    found: str
    wanted: str
    todo: str = ""

    def __str__(self) -> str:
        """Render as one line: `where: found ...; wanted ...; todo`."""
        text = f"{self.where}: found {self.found}; wanted {self.wanted}"
        return f"{text}; {self.todo}" if self.todo else text


class ConfigError(SlimeError, ValueError):
    """The settings are wrong; carries every `Problem` found, not only the first."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...]]]:
        """Pickle by the problems, from which the message is rebuilt."""
        return type(self), (self.problems,)


def exit_status(error: SlimeError) -> int:
    """Return the process exit status for `error`: 2 for bad input, 1 for a failure while running, 128 + n for signal n."""
    if isinstance(error, Interrupted):
        return 128 + error.number
    return (
        2 if isinstance(error, ConfigError | PluginError | DataError | RewardError | CheckpointError) else 1
    )
