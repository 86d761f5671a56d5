"""The sampler, against a slow and obvious reference."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from slime_core.protocols import SamplingParams
from slime_torch.generation.sampling import Draws, sample, uniform

#: 99.99% quantile of chi-square with 19 degrees of freedom, from tables.
CHI_SQUARE_19 = 50.8


def distribution(logits: list[float], params: SamplingParams) -> dict[int, float]:
    """Token -> probability, by the definition in `SamplingParams`, in Python floats."""
    scaled = {i: logit / params.temperature for i, logit in enumerate(logits)}
    order = sorted(scaled, key=lambda i: -scaled[i])
    if params.top_k != -1:
        order = order[: params.top_k]
    weights = {i: math.exp(scaled[i]) for i in order}
    total = sum(weights.values())
    nucleus: dict[int, float] = {}
    for i in order:
        if sum(nucleus.values()) >= params.top_p * total:
            break
        nucleus[i] = weights[i]
    kept = sum(nucleus.values())
    return {i: weight / kept for i, weight in nucleus.items()}


def draws(params: SamplingParams, n: int) -> Draws:
    return Draws.of([params] * n, range(n), [7] * n)


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    drawn = Draws.of([SamplingParams(max_new_tokens=1)] * len(seeds), seeds, positions)
    return uniform(drawn.seeds, drawn.positions)


@pytest.mark.parametrize("vocab", [20, 256, 3000])
@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"),
    [
        (1.0, 1.0, -1),
        (0.6, 1.0, -1),
        (1.0, 0.9, -1),
        (1.3, 1.0, 5),
        (0.8, 0.7, 12),
        (4.0, 0.999, -1),
        (1.0, 0.01, -1),
    ],
)
def test_log_probs_are_those_of_the_distribution_sampled_from(vocab, temperature, top_p, top_k):
    params = SamplingParams(max_new_tokens=1, temperature=temperature, top_p=top_p, top_k=top_k)
    logits = torch.randn(16, vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    tokens, log_probs, _ = sample(logits, draws(params, 16))
    for row, token, log_prob in zip(logits.tolist(), tokens, log_probs, strict=True):
        assert log_prob == pytest.approx(math.log(distribution(row, params)[token]), abs=1e-5)


def test_every_row_follows_its_own_parameters():
    params = [
        SamplingParams(max_new_tokens=1, temperature=t, top_p=p, top_k=k)
        for t, p, k in itertools.product((0.5, 1.0, 2.0), (0.5, 1.0), (-1, 3))
    ]
    logits = torch.randn(len(params), 50, generator=torch.Generator().manual_seed(0)) * 2
    together = sample(logits, Draws.of(params, [5] * len(params), range(len(params))))
    alone = [sample(logits[i : i + 1], Draws.of([param], [5], [i])) for i, param in enumerate(params)]
    assert together[0] == [token for [token], _, _ in alone]
    assert together[1] == pytest.approx([log_prob for _, [log_prob], _ in alone], abs=1e-6)


@pytest.mark.parametrize(("temperature", "top_p", "top_k"), [(1.0, 1.0, -1), (0.7, 0.95, -1), (1.5, 0.9, 8)])
def test_frequencies_are_the_probabilities(temperature, top_p, top_k):
    params = SamplingParams(max_new_tokens=1, temperature=temperature, top_p=top_p, top_k=top_k)
    row = (torch.randn(20, generator=torch.Generator().manual_seed(3)) * 1.5).tolist()
    n = 20_000
    tokens, _, _ = sample(torch.tensor([row]).expand(n, -1), draws(params, n))
    expected = distribution(row, params)
    counts = np.bincount(tokens, minlength=20)
    assert set(np.flatnonzero(counts)) <= set(expected)
    assert sum((counts[i] - n * p) ** 2 / (n * p) for i, p in expected.items()) < CHI_SQUARE_19


def test_positions_of_one_seed_are_independent_draws():
    params = SamplingParams(max_new_tokens=1)
    row = (torch.randn(20, generator=torch.Generator().manual_seed(4)) * 1.5).tolist()
    n = 20_000
    tokens, _, _ = sample(torch.tensor([row]).expand(n, -1), Draws.of([params] * n, [11] * n, range(n)))
    counts = np.bincount(tokens, minlength=20)
    assert (
        sum((counts[i] - n * p) ** 2 / (n * p) for i, p in distribution(row, params).items()) < CHI_SQUARE_19
    )


def test_uniform_numbers_fill_the_interval_evenly():
    seeds, positions = zip(*itertools.product(range(200), range(200)), strict=True)
    counts = np.histogram(uniforms(seeds, positions), bins=20, range=(0, 1))[0]
    assert ((counts - 2000) ** 2 / 2000).sum() < CHI_SQUARE_19


def test_uniform_depends_on_seed_and_position_alone():
    together = uniforms([1, 2, 3, -1], [5, 6, 7, 8])
    assert together.tolist() == [uniforms([s], [p])[0] for s, p in ((1, 5), (2, 6), (3, 7), (-1, 8))]


def test_greedy_takes_the_first_of_equals_with_its_untempered_log_prob():
    logits = torch.zeros(1, 600)
    logits[0, [280, 300, 599]] = 2.0
    params = SamplingParams(max_new_tokens=1, temperature=0, top_p=0.5, top_k=2)
    [token], [log_prob], _ = sample(logits, Draws.of([params], [0], [0]))
    assert token == 280
    assert log_prob == pytest.approx(2 - math.log(3 * math.exp(2) + 597), abs=1e-6)


def test_tokens_of_no_probability_are_never_drawn():
    logits = torch.full((4000, 512), -torch.inf)
    logits[:, 255], logits[:, 256] = 0.0, 0.0
    tokens, log_probs, _ = sample(logits, draws(SamplingParams(max_new_tokens=1), 4000))
    assert set(tokens) == {255, 256}
    assert log_probs == pytest.approx([math.log(0.5)] * 4000)


def test_the_ids_that_a_token_was_drawn_from_are_told():
    """Probabilities 0.4, 0.3, 0.2, 0.1 of ids 3, 0, 2, 1: 0.6 is reached with two, 0.8 with three; three of four by k."""
    logits = torch.tensor([[0.3, 0.1, 0.2, 0.4]]).log().expand(5, -1)
    asked = [{"top_p": 0.6}, {"top_p": 0.8}, {"top_k": 3}, {}, {"top_p": 0.6, "temperature": 0}]
    rows = Draws.of([SamplingParams(max_new_tokens=1, **params) for params in asked], [7] * 5, [0] * 5)
    tokens, _, sampling_masks = sample(logits, rows, with_sampling_masks=True)
    assert [None if ids is None else ids.tolist() for ids in sampling_masks] == [
        [0, 3],
        [0, 2, 3],
        [0, 2, 3],
        None,
        None,
    ]
    assert all(token in ids for token, ids in zip(tokens[:3], sampling_masks, strict=False))
    assert sample(logits, rows)[2] == [None] * 5


def test_the_logits_are_left_as_they_are():
    logits = torch.randn(3, 40)
    before = logits.clone()
    sample(logits, draws(SamplingParams(max_new_tokens=1, temperature=0.5, top_p=0.5, top_k=4), 3))
    assert torch.equal(logits, before)


def test_log_probs_over_a_real_vocabulary_are_exact_to_a_millionth():
    """`torch.log_softmax` is off by 4e-6 here, always to the same side."""
    logits = torch.randn(16, 49_152, generator=torch.Generator().manual_seed(0)) * 4
    tokens, log_probs, _ = sample(logits, draws(SamplingParams(max_new_tokens=1), 16))
    wanted = logits.double().log_softmax(-1)[torch.arange(16), tokens]
    assert (torch.tensor(log_probs, dtype=torch.float64) - wanted).abs().max() < 1e-6
