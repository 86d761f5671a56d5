"""The environment `calculator`: a tool that works out what the policy writes between two tags."""

from __future__ import annotations

from slime_core.protocols import Environment, Observation
from slime_core.samples import Sample, Status

from slime_gym.environments.arithmetic import evaluate


class Calculator(Environment):
    """Answers a turn that ends in `<calc>12*7</calc>` with ` = 84`, and ends the conversation after any other turn.

    The closing tag is to be a stop string (`--rollout-stop`), or the policy goes on without waiting for the answer. What cannot
    be worked out is answered by the reason, as the policy's mistake. It gives no reward: choose one.

    Args:
        opening: tag before an expression.
        closing: tag after it.
        template: the answer, with `{result}` where the value goes.
    """

    def __init__(
        self, *, opening: str = "<calc>", closing: str = "</calc>", template: str = " = {result}"
    ) -> None:
        self._opening, self._closing, self._template = opening, closing, template

    async def reset(self, sample: Sample) -> None:
        """Say nothing: the prompt explains the tool."""

    async def step(self, sample: Sample, text: str) -> Observation:
        """Work out the expression that ends the turn."""
        body = text.rstrip()
        if sample.status is Status.TRUNCATED or not body.endswith(self._closing) or self._opening not in body:
            return Observation(done=True)
        expression = body.removesuffix(self._closing).rpartition(self._opening)[2]
        try:
            result = evaluate(expression)
        except ValueError as error:
            result = f"error: {error}"
        said = self._template.replace("{result}", result)
        return Observation(content=said, info={"expression": expression, "result": result})

    def state(self) -> dict[str, int]:
        """Return nothing to remember: every turn is answered by itself."""
        return {}
