"""The same candidates as without a GPU, launched and timed on one. It needs a GPU with CUDA, and nobody else on it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from slime_kernels.judge.evaluator import Evaluator, EvaluatorSettings, Options
from slime_kernels.timing.gpus import devices_for

from ..kernel_corpus import FAILS_WHERE_INPUTS_COME_AGAIN, candidates, written

pytestmark = pytest.mark.gpu
#: Cheats that nothing but running them shows.
CHEATS = ("cache_on_self", "torch_with_decoy_kernel", "torch_at_full_size")


@pytest.fixture(scope="module")
def on_gpu(fork_server, tmp_path_factory):
    settings = EvaluatorSettings(
        options=Options(n_trials=3), compiles=False, baseline_dir=tmp_path_factory.mktemp("baselines")
    )
    return Evaluator(settings, fork_server, devices=devices_for("cuda"))


@pytest.mark.parametrize("name", written())
def test_a_right_kernel_is_right_and_timed_and_wrong_ones_are_wrong(on_gpu, name):
    problem, kernel, wrong = written()[name]
    verdict = on_gpu.evaluate(problem, kernel)
    assert verdict.correct, verdict.message
    assert verdict.timing.source == "cuda-events"
    assert verdict.timing.target == on_gpu._device_trials.take().gpu.name
    assert verdict.timing.runtime_us > 0
    quick = Options(n_trials=3, measure=False)
    for one in wrong:
        if one["status"] == "incorrect" and "race" not in one["what"]:  # the GPU may run a race well
            assert not on_gpu.evaluate(problem, one["source"], options=quick).correct, one["what"]


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_caught(on_gpu, name):
    assert not on_gpu.evaluate(*candidates("cheats")[name]).correct


def test_a_product_that_is_rounded_to_tf32_at_full_size_alone_is_caught(on_gpu):
    """Its trials are smaller than the 256 x 320 x 192 products of the problem."""
    problem, kernel, _ = written()["matmul"]
    precise, before = 'input_precision="ieee"', "BK: tl.constexpr)"
    assert precise in kernel and before in kernel
    source = kernel.replace(precise, "input_precision=P").replace(
        before, "BK: tl.constexpr, P: tl.constexpr)"
    )
    source = source.replace("BK=16)", 'BK=16, P="ieee" if M * N * K < 10**7 else "tf32")')
    verdict = on_gpu.evaluate(problem, source)
    assert (verdict.status, verdict.gate) == ("rejected", "honest"), verdict.message
    assert "does other things at full size than in the trials" in verdict.message


def test_no_two_calls_at_full_size_have_the_same_inputs(on_gpu):
    problem, _, _ = written()["relu"]
    verdict = on_gpu.evaluate(problem, FAILS_WHERE_INPUTS_COME_AGAIN)
    assert verdict.timing is not None, verdict.message


def test_two_timings_of_a_kernel_agree(on_gpu):
    problem, kernel, _ = written()["relu"]
    one, other = (on_gpu.evaluate(problem, f"{kernel}# {n}\n").timing for n in range(2))
    assert not one.doubt and not other.doubt
    assert one.runtime_us == pytest.approx(other.runtime_us, rel=0.2)


def test_torch_compile_is_timed_and_kept(on_gpu, fork_server):
    problem, kernel, _ = written()["relu"]
    settings = replace(on_gpu.settings, compiles=True, baseline_dir=None)
    verdict = Evaluator(settings, fork_server, devices=devices_for("cuda")).evaluate(problem, kernel)
    assert verdict.timing is not None, verdict.message
    parts = verdict.timing.parts
    assert parts["eager_us"] > 0
    assert parts.get("compile_error") is None, parts["compile_error"]
    assert parts["compile_us"] > 0
