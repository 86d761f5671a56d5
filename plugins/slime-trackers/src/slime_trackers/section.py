"""Settings of the trackers."""

from __future__ import annotations

from typing import Literal

from slime_core.config.base import FilePath, SectionModel


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
    dir: FilePath | None = None
    """Folder for W&B's files; the run's folder when not given."""


class TensorboardSection(SectionModel):
    """TensorBoard."""

    project_name: str | None = None
    """Folder of the events under TENSORBOARD_DIR (`runs/tensorboard` where that is not set); when not given, events
    are in the run's folder."""
    experiment_name: str | None = None
    """Folder of the run's events under the project; the run's name when not given."""


class MlflowSection(SectionModel):
    """MLflow. Credentials are not settings: MLflow's own variables hold them."""

    tracking_uri: str | None = None
    """Server or folder of MLflow; MLFLOW_TRACKING_URI when not given, and without that `mlflow` in the run's folder."""
    experiment_name: str = "slime"
    """Experiment that the run is part of; made where there is none of this name."""
    run_id: str | None = None
    """Id of an MLflow run to go on with; a resumed run finds its own."""


class SwanlabSection(SectionModel):
    """SwanLab. The key is not a setting: `swanlab login` or SWANLAB_API_KEY."""

    project: str = "slime"
    """Project of the experiment at SwanLab."""
    workspace: str | None = None
    """User or organisation that the project belongs to."""
    group: str | None = None
    """Group of the experiment."""
    run_id: str | None = None
    """Id of an experiment to go on with; a resumed run finds its own."""
    mode: Literal["online", "local", "offline", "disabled"] | None = None
    """`offline` writes files for `swanlab sync`, `local` those for its dashboard; when not given, SWANLAB_MODE decides."""
    log_dir: FilePath | None = None
    """Folder for SwanLab's files; `swanlab` in the run's folder when not given."""


class TrackioSection(SectionModel):
    """trackio. What is kept here is in the folder that TRACKIO_DIR names, where `trackio show` looks for it."""

    project: str = "slime"
    """Project of the run."""
    group: str | None = None
    """Group of the run."""
    space_id: str | None = None
    """Hugging Face Space to send metrics to, as `name/space`; kept here alone when not given."""
    server_url: str | None = None
    """Address of a trackio server of your own, to send metrics to."""
