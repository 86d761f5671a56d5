"""Launch scripts that are Python: the reference system's `command_utils`, by `slime train`.

Nothing is killed and no cluster is started before a run: the launcher `ray` starts one where none is.
"""

from __future__ import annotations

import os
import random
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

#: Program of the reference system -> module that runs its arguments.
_MODULES = {"train.py": "slime_compat.train", "train_async.py": "slime_compat.train_async"}
_TRUE, _FALSE = ("true", "1"), ("false", "0", "")


@dataclass
class ExecuteTrainConfig:
    """What scripts derive their own settings from."""

    cuda_core_dump: bool = False
    num_nodes: int = 1
    extra_env_vars: str = ""
    """`NAME=VALUE` words, for the run's processes."""


def exec_command(cmd: str, capture_output: bool = False) -> str | None:
    """Run a command of bash; returns what it printed, if that is asked for.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    print(f"EXEC: {cmd}", flush=True)
    done = subprocess.run(["bash", "-c", cmd], check=True, text=True, capture_output=capture_output)
    return done.stdout if capture_output else None


def execute_train(
    train_args: str,
    num_gpus_per_node: int,
    megatron_model_type: str | None = None,
    train_script: str = "train.py",
    before_ray_job_submit: Callable[[], None] | None = None,
    extra_env_vars: Mapping[str, str] | None = None,
    config: ExecuteTrainConfig | None = None,
) -> None:
    """Run `slime train` with arguments as bash reads them.

    Args:
        train_args: of the program.
        num_gpus_per_node: of each machine.
        megatron_model_type: not needed: the model's folder says what it is.
        train_script: `train.py` or `train_async.py`, wherever that is.
        before_ray_job_submit: called first.
        extra_env_vars: of the run's processes.
        config: more of these.

    Raises:
        ValueError: the program is another.
        subprocess.CalledProcessError: the run failed.
    """
    module = _MODULES.get(Path(train_script).name)
    if module is None:
        raise ValueError(
            f"execute_train: found train_script {train_script!r}; wanted one of {', '.join(_MODULES)}: a loop of your own is a "
            "program over the core API (docs/custom-loop.md)"
        )
    if before_ray_job_submit is not None:
        before_ray_job_submit()
    pairs = (word.partition("=") for word in (config.extra_env_vars if config else "").split())
    more = {name: value for name, _, value in pairs} | dict(extra_env_vars or {})
    words = "".join(f"{name}={shlex.quote(value)} " for name, value in more.items())
    gpus = "" if "--num-gpus-per-node" in train_args else f" --num-gpus-per-node {num_gpus_per_node}"
    exec_command(f"{words}{shlex.quote(sys.executable)} -m {module} {train_args}{gpus}")


def convert_checkpoint(model_name: str, *_: object, **__: object) -> None:
    """Do nothing: weights are read from the Hugging Face folder as they are."""
    print(f"convert_checkpoint: {model_name} needs no conversion")


def hf_download_dataset(full_name: str) -> None:
    """Fetch a data set of Hugging Face to `datasets/NAME` in the home folder, where the reference's containers have it."""
    folder = Path.home() / "datasets" / full_name.rpartition("/")[2]
    exec_command(
        f"hf download --repo-type dataset {shlex.quote(full_name)} --local-dir {shlex.quote(str(folder))}"
    )


def get_default_wandb_args(
    test_file: str, run_name_prefix: str | None = None, run_id: str | None = None
) -> str:
    """Return arguments for Weights & Biases where `WANDB_API_KEY` is set, which stays in the environment; else none."""
    if not os.environ.get("WANDB_API_KEY"):
        return ""
    name = "_".join(part for part in (run_name_prefix, run_id or create_run_id()) if part)
    return f"--use-wandb --wandb-project slime-{Path(test_file).stem} --wandb-group {name} "


def create_run_id() -> str:
    """Return a name from the time of day and a random number."""
    return f"{time.strftime('%y%m%d-%H%M%S', time.gmtime())}-{random.randint(0, 999):03d}"


def get_bool_env_var(name: str, default: str = "false") -> bool:
    """Return whether a variable says true.

    Raises:
        ValueError: it says neither true nor false.
    """
    value = os.environ.get(name, default).lower()
    if value not in (*_TRUE, *_FALSE):
        raise ValueError(f"{name}: found {value!r}; wanted true or false")
    return value in _TRUE
