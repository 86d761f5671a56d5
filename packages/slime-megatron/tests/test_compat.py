"""The compatibility layer: nothing dead, nothing left behind in torch, and only for the version that it is for."""

from __future__ import annotations

import os
import sys

import pytest
import torch
from slime_core.errors import TrainerError
from slime_megatron import compat
from slime_megatron.settings.section import MegatronSection

from .batches import make_batch

no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="there is no stand-in where CUDA exists")


@no_cuda
def test_every_redirect_is_taken(megatron, make_learner, make_hf, tmp_path):
    from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher

    MoEAlltoAllTokenDispatcher.cuda_dtoh_stream = None  # made once a process
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 48, "head_dim": 32}
    _, folder = make_hf("qwen3_moe", **experts)
    megatron.hits.clear()
    buckets = {"overlap_grad_reduce": True, "ddp_bucket_size": "20000"}  # some of which end in padding
    section = MegatronSection(
        recompute_granularity="full", use_distributed_optimizer=True, megatron_args=buckets
    )
    learner = make_learner(folder=folder, bf16=True, megatron=section)
    learner.train(make_batch())
    learner.save(tmp_path)
    learner.load(tmp_path)
    flags = {"optimizer_cpu_offload": True, "recompute_modules": ["moe_act"]}
    section = MegatronSection(recompute_granularity="selective", megatron_args=flags)
    make_learner(folder=folder, bf16=True, megatron=section).train(make_batch())
    across_ranks = {redirect.name for redirect in compat.REDIRECTS if redirect.across_ranks}
    assert set(megatron.dead) == across_ranks
    assert set(megatron.redirects) == {redirect.name for redirect in compat.wanted_redirects()}


def test_repeated_installation_changes_nothing(megatron):
    assert compat.install() is megatron


def test_nobody_elses_torch_is_changed(megatron):
    import megatron.core.utils

    assert torch.zeros.__module__ is None or not hasattr(torch.zeros, "__wrapped__")
    assert not hasattr(torch.cuda.current_device, "__wrapped__")
    assert torch.zeros(1).type() == "torch.FloatTensor"
    assert torch.compile.__module__ == "torch"
    assert all(
        name not in sys.modules or sys.modules[name] is not None for name in ("flash_attn", "flashinfer")
    )
    if not torch.cuda.is_available():
        assert megatron.core.utils.torch is not torch


@no_cuda
def test_megatron_imported_too_early_is_an_error(megatron):
    with pytest.raises(TrainerError, match=r"imported before slime_megatron.compat.install\(\)"):
        compat.install.__wrapped__()


def test_another_version_of_megatron_is_refused(megatron, monkeypatch):
    monkeypatch.setattr(compat.importlib.metadata, "version", lambda _: "0.21.0")
    with pytest.raises(
        TrainerError, match=r"megatron-core 0\.21\.0 is installed; wanted at least 0\.19 and below 0\.20"
    ):
        compat.install.__wrapped__()


@no_cuda
def test_a_process_alone_has_one_group_and_its_threads_for_all_roles(megatron, make_learner):
    """It was one of three threads for each of some twenty roles."""
    from megatron.core import parallel_state

    def threads() -> int:
        return len(os.listdir("/proc/self/task"))

    before = threads()
    make_learner()
    assert threads() - before <= 6  # the world's own group, and that of the roles
    groups = {
        id(getattr(parallel_state, f"get_{role}_group")())
        for role in ("tensor_model_parallel", "pipeline_model_parallel", "context_parallel", "data_parallel")
    }
    assert len(groups) == 1
