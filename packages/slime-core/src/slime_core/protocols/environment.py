"""The protocol `Environment`: what the policy talks to, under the generator `multi-turn`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from slime_core.samples import Sample

#: Key of `Sample.metadata` under which `multi-turn` keeps its record of a conversation: `environment`, `turns`,
#: `environment_tokens`, `ended_by`, `reward` and `info` (a list, an entry a turn).
MULTI_TURN = "multi_turn"
#: Text, or token ids.
Content = str | Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Observation:
    """An environment's answer to a turn of the policy."""

    content: Content = ""
    """What is appended to the response, not to be trained on; text is encoded once, ids are taken as they are."""
    done: bool = False
    """Whether the conversation ends here; what `content` says is appended then, too, if there is room."""
    reward: float | None = None
    """Reward of this turn. Their sum is the sample's reward where no other is chosen; an environment that scores gives a
    number every turn, 0.0 if nothing is earned."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """JSON values for the record."""
    siblings: Sequence[Sample] = ()
    """Finished samples of a branch of their own, such as another agent's; they get the sample's `rollout_id`."""


class Environment(Protocol):
    """Answers the policy's turns in one conversation; an object a sample, which its factory makes.

    The coroutines run on the run's event loop beside many others, each under a deadline: they must not block. What they
    raise ends the run with an error that names sample and environment. Derive from this class for the methods that most
    environments need not write.
    """

    def use(self, services: dict[str, Any]) -> None:
        """Take what plugins share in the run, by a name of theirs (`GenerateContext.services`); called first."""
        return

    async def reset(self, sample: Sample) -> Content | None:
        """Begin the conversation; returns what stands between the prompt and the first turn, if anything."""

    async def step(self, sample: Sample, text: str) -> Observation:
        """Answer a turn.

        Args:
            sample: with the whole response so far. One whose status is TRUNCATED was cut off, and gets no further turn.
            text: of this turn, its stop string included, and nothing after that: its last token may spell more. The id that ends a
                sequence (`<|im_end|>`) is left out.
        """

    def state(self) -> Any:
        """Return, as JSON values, what `restore` needs to go on with an aborted conversation; None: it begins anew."""
        return None

    async def restore(self, sample: Sample, state: Any) -> None:
        """Take the place of `reset` in a conversation that goes on."""

    async def close(self) -> None:
        """End the conversation; called once, whatever happened."""
