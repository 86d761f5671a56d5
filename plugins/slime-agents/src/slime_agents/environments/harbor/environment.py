"""The environment `harbor`: the policy works on a task by shell commands, and the task's own tests give the reward."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_core.errors import EnvironmentFailure, SampleError
from slime_core.plugins.importing import import_object
from slime_core.protocols import Environment, Observation
from slime_core.runtime.deadline import seconds_left
from slime_core.samples import Sample, Status

from slime_agents.environments.harbor.box import Said, SubprocessBox, TaskBox
from slime_agents.environments.harbor.task import HarborTask, read_task

#: Key of `Sample.metadata` that names the task's folder; the data source `harbor` sets it.
HARBOR = "harbor"
#: Name among a run's services of what says that tests have less time than their task gives them.
TOLD = "slime-agents/harbor-told"
#: Of the time that a turn has left, what tests leave to the start and the end of their box: this part, and at most these seconds.
_SPARE, _SPARE_S = 0.2, 10.0

logger = logging.getLogger(__name__)


class Harbor(Environment):
    """Runs the command that ends a turn, as `<bash>ls</bash>`, and answers with its output; any other turn ends the work.

    Then the task's tests run, and the reward is what they leave in `/logs/verifier/reward.txt`, or under `reward` in
    `reward.json`. Tests that are stopped (time, memory) give 0.0; those that end without a reward are an error. They have the time
    that the task gives them (`verifier.timeout_sec`, 600 s where it says none), and at most what `environment_timeout_s` leaves, less
    10 s, or a fifth, for their box. The closing tag is to be a stop string (`--rollout-stop "</bash>"`). Begins anew when it is aborted.

    Args:
        box: `subprocess` runs commands in slime's sandbox for code; `module:factory` names a `(task) -> TaskBox`, such as one
            with Docker or on another machine.
        command_timeout_s: deadline of a command, seconds; less than `environment_timeout_s`.
        output_chars: most characters of a command's output that the policy reads: as many from its start as from its end.
        opening: tag before a command.
        closing: tag after it.
        template: what stands after a command, with `{output}`.
    """

    def __init__(
        self,
        *,
        box: str = "subprocess",
        command_timeout_s: float = 10.0,
        output_chars: int = 2000,
        opening: str = "<bash>",
        closing: str = "</bash>",
        template: str = "\n<output>\n{output}</output>\n",
    ) -> None:
        self._make: Any = SubprocessBox if box == "subprocess" else import_object(box)
        self._timeout_s, self._chars = command_timeout_s, output_chars
        self._opening, self._closing, self._template = opening, closing, template
        self._task: HarborTask | None = None
        self._box: TaskBox | None = None
        self._services: dict[str, Any] = {}

    def use(self, services: dict[str, Any]) -> None:
        """Share with the run whether it has been told that tests have less time than their task gives them."""
        self._services = services

    async def reset(self, sample: Sample) -> None:
        """Make the task's box; the prompt is its instruction."""
        folder = sample.metadata.get(HARBOR)
        if not isinstance(folder, str):
            raise SampleError(
                f"{sample.name}: metadata has no {HARBOR!r}, the folder of a task; use --data-source-path harbor"
            )
        self._task = read_task(Path(folder))
        self._box = self._make(self._task)

    async def step(self, sample: Sample, text: str) -> Observation:
        """Run the command that ends the turn, or the tests."""
        assert self._box is not None
        body = text.rstrip()
        asks = body.endswith(self._closing) and self._opening in body
        if sample.status is Status.TRUNCATED or not asks:
            return await self._scored(sample)
        command = body.removesuffix(self._closing).rpartition(self._opening)[2].strip()
        said = await self._box.run(command, timeout_s=self._timeout_s)
        shown = self._template.replace("{output}", self._shown(said))
        return Observation(content=shown, reward=0.0, info={"command": command, "code": said.code})

    async def close(self) -> None:
        """Remove the box."""
        if self._box is not None:
            await self._box.close()

    async def _scored(self, sample: Sample) -> Observation:
        assert self._box is not None and self._task is not None
        said, logs = await self._box.verify(timeout_s=self._tests_timeout_s(self._task))
        if said.stopped:
            return Observation(done=True, reward=0.0, info={"tests_stopped": said.stopped})
        reward = reward_of(logs)
        if reward is None:
            raise EnvironmentFailure(
                f"{sample.name}: the environment harbor: {self._task.tests}/test.sh left no number in "
                f"/logs/verifier/reward.txt or reward.json (exit status {said.code}); its output ends "
                f"{said.output[-300:]!r}"
            )
        return Observation(done=True, reward=reward)

    def _tests_timeout_s(self, task: HarborTask) -> float:
        """Return the deadline of the tests: they are to be stopped, at 0.0, before their turn's deadline ends the run."""
        wanted, left = task.verifier_timeout_s, seconds_left()
        if left is None or (most := left - min(_SPARE * left, _SPARE_S)) >= wanted:
            return wanted
        if TOLD not in self._services:
            self._services[TOLD] = True
            logger.warning(
                "harbor: the tests of %s may take %g s (verifier.timeout_sec), and the deadline of a turn leaves them %.1f s; "
                "those that take longer give 0.0. Give them all by --environment-timeout-s %g",
                task.folder,
                wanted,
                most,
                math.ceil(min(wanted + _SPARE_S, wanted / (1 - _SPARE)) + 1),
            )
        return max(most, 0.0)

    def _shown(self, said: Said) -> str:
        """Return what the policy reads of a command."""
        if said.stopped:
            return f"stopped: {said.stopped}; nothing that the command wrote is kept\n"
        text, half = said.output, self._chars // 2
        if len(text) > self._chars:
            text = f"{text[:half]}\n... {len(text) - 2 * half} characters ...\n{text[-half:]}"
        text = text if not text or text.endswith("\n") else text + "\n"
        return text if said.code == 0 else f"{text}exit status {said.code}\n"


def reward_of(logs: Mapping[str, str]) -> float | None:
    """Return the reward that tests left in files, by name; None where there is no finite number."""
    text = logs.get("reward.txt", "").strip()
    if not text and "reward.json" in logs:
        try:
            found = json.loads(logs["reward.json"])
        except ValueError:
            return None
        text = str(found.get("reward", "")) if isinstance(found, dict) else ""
    try:
        reward = float(text)
    except ValueError:
        return None
    return reward if math.isfinite(reward) else None
