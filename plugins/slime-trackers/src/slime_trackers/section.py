"""Settings of the trackers."""

from __future__ import annotations

from typing import Literal

from slime_core.config.base import SectionModel


class WandbSection(SectionModel):
    """Weights & Biases. The key is not a setting: `wandb login` or WANDB_API_KEY."""

    project: str = "slime"
    """Project of the run at W&B."""
    team: str | None = None
    """Team or user that the run belongs to."""
    group: str | None = None
    """Group of the run."""
    run_id: str | None = None
    """Id of a W&B run to go on with; a resumed run finds its own."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """`offline` writes the run's folder alone; when not given, WANDB_MODE decides."""
    host: str | None = None
    """Address of a W&B server of your own."""
    dir: str | None = None
    """Folder for W&B's files; the run's folder when not given."""


class TensorboardSection(SectionModel):
    """TensorBoard."""

    project_name: str | None = None
    """Folder of the events under TENSORBOARD_DIR (`runs/tensorboard` where that is not set); when not given, events
    are in the run's folder."""
    experiment_name: str | None = None
    """Folder of the run's events under the project; the run's name when not given."""
