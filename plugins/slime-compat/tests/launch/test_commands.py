"""Launch scripts in Python, over the tabular policy."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from slime.utils.external_utils import command_utils

from .test_debug_runs import words

SCRIPT = """
import slime.utils.external_utils.command_utils as U

ARGS = {args!r}


def prepare():
    U.exec_command("mkdir -p models")
    U.convert_checkpoint(model_name="letters", megatron_model_type="qwen3-4B", num_gpus_per_node=1)


def execute():
    wandb = U.get_default_wandb_args(__file__)
    U.execute_train(train_args=f"{{ARGS}} {{wandb}}", num_gpus_per_node=1, megatron_model_type="qwen3-4B")


if __name__ == "__main__":
    prepare()
    execute()
"""


def test_a_launch_script_in_python_trains(letters, tmp_path):
    given = words(tmp_path, "by-python")[2:]
    (tmp_path / "run_letters.py").write_text(SCRIPT.format(args=" ".join(given)))
    done = subprocess.run(
        [sys.executable, "run_letters.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "letters needs no conversion" in done.stdout and (tmp_path / "models").is_dir()
    assert json.loads((tmp_path / "by-python/summary.json").read_text())["steps"] == 2


def test_a_program_of_a_users_own_is_refused():
    with pytest.raises(
        ValueError, match=r"found train_script 'mine/loop.py'; wanted one of train.py, train_async.py"
    ):
        command_utils.execute_train("", 8, train_script="mine/loop.py")


def test_keys_stay_in_the_environment(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret-2")
    told = command_utils.get_default_wandb_args("run_x.py", run_name_prefix="a", run_id="b")
    assert told == "--use-wandb --wandb-project slime-run_x --wandb-group a_b "
    monkeypatch.setenv("ON", "perhaps")
    with pytest.raises(ValueError, match="ON: found 'perhaps'; wanted true or false"):
        command_utils.get_bool_env_var("ON")
