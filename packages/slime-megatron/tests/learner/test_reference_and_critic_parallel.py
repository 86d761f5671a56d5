"""Reference and critic under every layout: the same numbers as in one process."""

from __future__ import annotations

import pytest

from ..batches import make_batch

TENSOR, PIPELINE = {"tensor_model_parallel_size": 2}, {"pipeline_model_parallel_size": 2}
LAYOUTS = {
    "TP2": (2, TENSOR),
    "TP2+SP": (2, TENSOR | {"sequence_parallel": True}),
    "PP2": (2, PIPELINE),
    "CP2": (2, {"context_parallel_size": 2}),
    "DP2": (2, {}),
    "TP2xPP2": (4, TENSOR | PIPELINE),
}


def numbers(metrics):
    return {name: value for name, value in metrics.items() if name.startswith("train/")}


@pytest.fixture(scope="module")
def in_one_process(ranks, cut_models):
    return ranks.run(
        "learn_with_a_critic",
        1,
        folder=cut_models["qwen3"],
        batch=make_batch(),
        megatron={},
        save=None,
        load=None,
    )[0]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_policy_reference_and_critic_do_not_depend_on_the_layout(ranks, cut_models, in_one_process, layout):
    n, megatron = LAYOUTS[layout]
    for found in ranks.run(
        "learn_with_a_critic",
        n,
        folder=cut_models["qwen3"],
        batch=make_batch(),
        megatron=megatron,
        save=None,
        load=None,
    ):
        for wanted, metrics in zip(in_one_process, found, strict=True):
            assert numbers(metrics) == pytest.approx(numbers(wanted), rel=2e-5, abs=1e-6)
    distances = [metrics["train/distance"] for metrics in in_one_process]
    assert distances[1] > 1e-4 and distances[2] == 0  # after two steps the reference is the policy
    assert in_one_process[2]["train/critic/old_value"] != 0


@pytest.mark.slow
def test_reference_and_critic_go_on_under_another_layout(ranks, cut_models, in_one_process, tmp_path):
    common = {"folder": cut_models["qwen3"], "batch": make_batch()}
    ranks.run("learn_with_a_critic", 4, megatron=TENSOR | PIPELINE, save=tmp_path, load=None, **common)
    for (metrics,) in ranks.run("learn_with_a_critic", 2, megatron={}, save=None, load=tmp_path, **common):
        assert numbers(metrics) == pytest.approx(numbers(in_one_process[2]), rel=2e-5, abs=1e-6)
