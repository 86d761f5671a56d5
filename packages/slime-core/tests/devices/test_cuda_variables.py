"""Variables of processes that use CUDA: defaults below what the user has set, and nobody else's."""

from __future__ import annotations

import pytest
from slime_core.devices.cuda_variables import (
    MARK,
    cuda_defaults,
    sees_gpu,
    set_trainer_defaults,
    users_environment,
)

TRAINER = {
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    "NCCL_CUMEM_ENABLE": "0",
    "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1",
}
SERVER = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1", "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}


@pytest.mark.parametrize(("nvlink", "nvls"), [(True, "1"), (False, "0")])
def test_trainer_and_server_get_their_own_and_nvls_where_there_is_nvlink(nvlink, nvls):
    assert cuda_defaults("trainer", {}, nvlink=lambda: nvlink) == TRAINER | {"NCCL_NVLS_ENABLE": nvls}
    assert cuda_defaults("server", {}, nvlink=lambda: nvlink) == SERVER | {"NCCL_NVLS_ENABLE": nvls}


def test_what_the_user_has_set_stays_even_if_it_is_nothing():
    def never():
        raise AssertionError("the links were asked for, which nobody needs to know")

    own = {"NCCL_NVLS_ENABLE": "", "CUDA_DEVICE_MAX_CONNECTIONS": "32", "HOME": "/"}
    assert cuda_defaults("trainer", own, nvlink=never) == {
        "NCCL_CUMEM_ENABLE": "0",
        "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1",
    }


def test_variables_that_were_set_for_the_trainer_are_not_the_users():
    own = {"CUDA_DEVICE_MAX_CONNECTIONS": "32", "NCCL_NVLS_ENABLE": "0", "HOME": "/"}
    environment = dict(own)
    set_trainer_defaults(environment)
    added = {"NCCL_CUMEM_ENABLE": "0", "NVTE_FP8_BLOCK_SCALING_FP32_SCALES": "1"}
    assert {name: environment[name] for name in environment if name != MARK} == own | added
    assert users_environment(environment) == own
    before = dict(environment)
    set_trainer_defaults(environment)  # a second stage of the same process
    assert environment == before


def test_a_gpu_is_seen_where_its_driver_is_and_it_is_not_hidden(tmp_path):
    (tmp_path / "nvidiactl").touch()
    drivers = [tmp_path / "dxg", tmp_path / "nvidiactl"]
    assert sees_gpu({}, drivers=drivers)
    assert sees_gpu({"CUDA_VISIBLE_DEVICES": "3"}, drivers=drivers)
    assert not sees_gpu({"CUDA_VISIBLE_DEVICES": ""}, drivers=drivers)
    assert not sees_gpu({"CUDA_VISIBLE_DEVICES": "-1"}, drivers=drivers)
    assert not sees_gpu({}, drivers=drivers[:1])
