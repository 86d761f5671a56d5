"""The variables of CUDA in the processes of ranks, on Ray clusters of this machine that claim to have GPUs, or have none."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Iterator

import pytest
from slime_core.config.load import load_settings
from slime_core.devices.cuda_variables import CUDA_VARIABLE_NAMES
from slime_core.launch.local import assemble_and, drive
from slime_core.plugins.registry import Registry

pytestmark = [pytest.mark.faults, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(params=[2, 0])
def n_gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A cluster with that many GPUs, as far as Ray knows, in an environment without variables of CUDA."""
    from slime_ray.launcher import set_environment

    set_environment()
    import ray

    for name in CUDA_VARIABLE_NAMES:
        monkeypatch.delenv(name, raising=False)
    ray.init(
        address="local", num_cpus=2, num_gpus=request.param, include_dashboard=False, log_to_driver=False
    )
    yield request.param
    ray.shutdown()


def test_ranks_with_gpus_get_defaults_below_what_the_user_and_the_flag_say(
    n_gpus, letters, root, monkeypatch, tmp_path
):
    from slime_ray.trainer.trainer import OnRay

    monkeypatch.syspath_prepend(root / "tests/plugins")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "2")  # by the user, in the shell of the driver alone
    flags = ["--train-backend", "letters.told:create_trainer", "--launcher", "ray", "--num-rollout", "1"]
    flags += ["--actor-num-gpus-per-node", "2"]
    flags += ["--train-env-vars", '{"NCCL_CUMEM_ENABLE": "1", "TOLD": "yes"}']
    registry = Registry()
    settings = load_settings([str(letters)], flags, registry=registry)
    before = dict(os.environ)
    asyncio.run(assemble_and(drive, settings, registry, placement=OnRay()))
    given = {"NCCL_NVLS_ENABLE": "2", "NCCL_CUMEM_ENABLE": "1", "TOLD": "yes"}
    defaults = {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}
    for rank in range(2):
        log = (tmp_path / f"runs/letters/ranks/rank_00{rank}.log").read_text()
        (found,) = re.findall(r"^variables (.*)$", log, re.MULTILINE)
        assert json.loads(found) == (given | defaults if n_gpus else given)
    assert {name: os.environ.get(name) for name in CUDA_VARIABLE_NAMES} == {
        name: before.get(name) for name in CUDA_VARIABLE_NAMES
    }
