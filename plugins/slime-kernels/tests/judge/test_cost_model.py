"""The cost model by hand: one launch on numbers of the data sheet, and variants whose order is plain."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
from slime_kernels.judge.cost_model import candidate_us, eager_us, kernels_of, least_us
from slime_kernels.sandbox.eager_cost import EagerCost, OneAttention
from slime_kernels.sandbox.launch_memory import LaunchMemory

from ..kernel_corpus import pairs, variants

MB = 1 << 20


def launch(**changes):
    given = {
        "name": "k",
        "programs": 4096,
        "run": 4096,
        "flops": 0,
        "products": 0,
        "loaded": 32 * MB,
        "stored": 32 * MB,
    }
    given["touched"] = [[32 * MB, 32 * MB], [32 * MB, 32 * MB]]
    return {**given, **changes}


def kernel(registers=32, spilled=0, shared=0, warps=4):
    target = {"registers": registers, "spilled_bytes": spilled, "shared_bytes": shared}
    return {"name": "k", "warps": warps, "targets": {"sm_80": target, "sm_90": target, "gfx942": target}}


def cost(launches, kernels=None, target="sm_90"):
    return candidate_us(launches, [kernels or kernel()] * len(launches), target)[0]


def test_a_copy_by_hand():
    # 64 MiB over 3.35 TB/s = 20.03 us; over the cache 8.4 us; the launch 2.5 us
    assert cost([launch()]) == pytest.approx(2.5 + 64 * MB / 3.35e6)


def test_eager_by_hand():
    operation = {"bytes": 3_350_000, "flops": 1000, "products": False}
    assert eager_us([operation], "sm_90") == pytest.approx(2.5 + 2.0 + 1.0)
    assert least_us(3_350_000, "sm_90") == pytest.approx(3.5)


def counted(function, *shapes):
    with torch.device("meta"):
        given = [torch.empty(shape) for shape in shapes]
    with EagerCost() as cost, OneAttention(cost):
        function(*given)
    return cost.operations


def test_a_convolution_is_a_matrix_product_by_hand():
    (product,) = counted(torch.mm, (1024, 1024), (1024, 16384))
    (same,) = counted(torch.nn.functional.conv2d, (1, 1024, 128, 128), (1024, 1024, 1, 1))
    # 2 x 1024 x 1024 x 16384 operations at 0.7 of 494 TFLOP/s: 99.4 us; the bytes take 41.3 us
    assert (product["flops"], same["flops"]) == (2**35, 2**35)
    for one in (product, same):
        assert eager_us([one], "sm_90") == pytest.approx(2.5 + 2.0 + 2**35 / (0.7 * 4.94e8))


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_one_kernel_by_hand(causal):
    attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=causal)
    (one,) = counted(lambda q, k, v: attend(query=q, key=k, value=v), *[(8, 16, 1024, 64)] * 3)
    # two products of 128 x 1024 x 64 x 1024, half of them where later tokens are not seen; four tensors of 33.6 MB
    assert one["flops"] == 2 * 2 * 128 * 1024 * 64 * 1024 // (1 + causal)
    assert one["bytes"] == 4 * 4 * 128 * 1024 * 64
    assert one["products"]


def test_a_depthwise_convolution_takes_as_long_as_its_bytes_by_hand():
    convolve = functools.partial(torch.nn.functional.conv2d, groups=64)
    (one,) = counted(convolve, (8, 64, 130, 130), (64, 1, 3, 3))
    # 9 products for each of 8 x 64 x 128 x 128 numbers; 68.2 MB take 20.3 us, the products 0.4 us
    assert one["flops"] == 2 * 9 * 8 * 64 * 128 * 128
    assert eager_us([one], "sm_90") == pytest.approx(4.5 + one["bytes"] / 3.35e6)


@pytest.mark.parametrize("target", ["sm_80", "sm_90", "gfx942"])
@pytest.mark.parametrize(
    ("better", "worse"),
    [
        (([launch()],), ([launch(), launch()],)),  # fused, and not
        (
            ([launch()],),
            ([launch(loaded=256 * MB, touched=[[32 * MB, 256 * MB], [32 * MB, 32 * MB]])],),
        ),  # coalesced
        (([launch()],), ([launch()], kernel(spilled=4096))),  # spills
        (([launch()],), ([launch()], kernel(registers=255, warps=8))),  # occupancy
        (([launch()],), ([launch(programs=8, run=8)],)),  # too few programs to fill the device
        (([launch()],), ([launch()], kernel(shared=60_000, warps=2))),  # shared memory
        (([launch()],), ([launch(flops=10**11)],)),  # arithmetic
        (([launch(products=10**11)],), ([launch(flops=10**11)],)),  # tensor cores, and not
        (([launch()],), ([launch(touched=[[32 * MB, 32 * MB]] * 3)],)),  # an intermediate tensor
        (([launch(loaded=64 * MB)],), ([launch(loaded=1024 * MB)],)),  # blocks that share what they read
    ],
)
def test_variants_whose_order_is_plain(better, worse, target):
    assert cost(*better, target=target) < cost(*worse, target=target)


def test_a_sample_of_programs_stands_for_all():
    part = launch(run=4, loaded=32 * MB // 1024, stored=32 * MB // 1024)
    part["touched"] = [[32 * MB, 32 * MB // 1024]] * 2
    assert cost([part]) == pytest.approx(cost([launch()]))


def test_a_launch_costs_what_its_own_specialisation_does_by_hand():
    spills, plain = kernel(spilled=4096), kernel()
    # each thread of 4096 programs of 4 warps writes and reads 4096 bytes, beside 64 MiB, through a cache of 8 TB/s
    wanted = 2 * 2.5 + 64 * MB / 3.35e6 + (64 * MB + 2 * 4096 * 4 * 32 * 4096) / 8e6
    launches = [launch(), launch()]
    assert candidate_us(launches, kernels_of(launches, [spills, plain]), "sm_90")[0] == pytest.approx(wanted)
    assert kernels_of([launch()] * 3, [spills, plain]) == [plain] * 3  # of other numbers, by name
    assert kernels_of([launch(name="other")], [spills, plain]) == [None]


def test_what_is_updated_in_place_moves_twice():
    # 1 MiB that is read and written in place: 2 MiB over 3.35 TB/s, as where it is read and another one is written
    traffic = {"touched": [[MB, MB], [MB, MB]], "loaded": MB, "stored": MB}
    assert cost([launch(**traffic)]) == pytest.approx(2.5 + 2 * MB / 3.35e6)
    memory = LaunchMemory([data := torch.zeros(8)], {}, seeks_races=False)
    at = data.data_ptr() + 4 * np.arange(8)
    memory.load(at, np.ones(8, bool), 4)
    memory.store(at, np.ones(8, bool), 4, np.zeros(8, np.float32))
    # 32 bytes are one sector, or two where they do not begin at one
    sectors = len({int(one) // 32 for one in at}) * 32
    assert memory.traffic()["touched"] == [[32, sectors], [32, sectors]]


def test_pairs_name_their_variants_and_a_reason():
    known, found = variants(), pairs()
    assert len(found) >= 30
    for one in found:
        assert (one["problem"], one["faster"]) in known
        assert (one["problem"], one["slower"]) in known
        assert len(one["why"]) > 20
    assert len({(one["problem"], one["faster"], one["slower"]) for one in found}) == len(found)


@pytest.mark.slow
@pytest.mark.faults
def test_every_pair_is_ranked_as_reasoned(evaluator):
    found = {}
    for name, (problem, source) in variants().items():
        verdict = evaluator.evaluate(problem, source)
        assert verdict.correct, (name, verdict.message)
        found[name] = verdict.timing.runtime_us
    wrong = [
        one for one in pairs() if found[one["problem"], one["faster"]] >= found[one["problem"], one["slower"]]
    ]
    assert wrong == []
