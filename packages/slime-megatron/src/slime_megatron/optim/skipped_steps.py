"""`SkippedSteps`: optimizer steps in a row that were skipped because their gradient is not finite, up to a limit."""

from __future__ import annotations

from slime_core.errors import TrainerError


class SkippedSteps:
    """Counts the optimizer steps in a row that were skipped; checkpoints hold the count, so that a restart does not reset it.

    Args:
        most: number that is allowed.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self.in_a_row = 0

    def add(self, norm: float) -> None:
        """Count a step that was skipped because its gradient has this norm.

        Raises:
            TrainerError: more than `most` steps in a row were skipped.
        """
        self.in_a_row += 1
        if self.in_a_row > self._most:
            raise TrainerError(
                f"the gradient norm is {norm} and {self.in_a_row} optimizer steps in a row were skipped; "
                f"max_skipped_steps is {self._most}; lower the learning rate, or look for bad samples "
                "in the last step"
            )
