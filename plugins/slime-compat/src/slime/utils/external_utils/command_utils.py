"""Launch scripts in Python: what prepares, and starts, a run."""

from slime_compat.launch.commands import (
    ExecuteTrainConfig,
    convert_checkpoint,
    create_run_id,
    exec_command,
    execute_train,
    get_bool_env_var,
    get_default_wandb_args,
    hf_download_dataset,
)
from slime_compat.views.running.absent import lacking

__all__ = [
    "ExecuteTrainConfig",
    "convert_checkpoint",
    "create_run_id",
    "exec_command",
    "execute_train",
    "get_bool_env_var",
    "get_default_wandb_args",
    "hf_download_dataset",
]
__getattr__ = lacking(
    __name__,
    {
        "fp8_cast_bf16": "quantised folders are read as they are; use --hf-checkpoint FOLDER",
        "dataclass_cli": "arguments of a script are its own; use typer or argparse",
        "check_has_nvlink": "NCCL finds links itself; use --train-env-vars",
    },
)
