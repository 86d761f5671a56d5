"""Who runs when there is not enough room for all: nothing that is generated depends on it."""

from __future__ import annotations

import pytest
import torch
from slime_core.protocols import SamplingParams
from slime_torch.generation.request import Request, StopRule
from slime_torch.generation.scheduler import Scheduler
from slime_torch.model.decoder import Decoder

from ..conftest import CONFIGS, FAMILIES, VOCAB, ByteTokenizer

CPU = torch.device("cpu")
MAX_LEN = 128


@pytest.fixture(scope="module", params=["llama", "qwen3_5_moe"])
def model(request):
    """Random weights; a family with keys and values alone, and one with states, too."""
    family = FAMILIES[request.param]
    architecture = family.architecture(CONFIGS[request.param]().to_dict() | {"model_type": family.model_type})
    made = Decoder(family, architecture, max_length=MAX_LEN, dtype=torch.float32, device=CPU)
    generator = torch.Generator().manual_seed(0)
    shapes = made.weights.shapes()
    made.weights.load({name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()})
    return made


def requests(lengths, *, responses=40, prompts=None):
    """Requests for greedy responses, with prompts of these lengths; those with one number in `prompts` have the same prompt."""
    made = []
    for i, length in enumerate(lengths):
        seed = i if prompts is None else prompts[i]
        generator = torch.Generator().manual_seed(seed)
        prompt = torch.randint(VOCAB, (length,), generator=generator).tolist()
        params = SamplingParams(max_new_tokens=responses, min_new_tokens=responses, temperature=0.0)
        made.append(Request(prompt, params, seed=i, stop=StopRule(params, ByteTokenizer())))
    return made


def generated(model, asked, *, max_tokens=None, max_running=8):
    cache = model.create_cache(max_running, max_tokens=max_tokens)
    tested = Scheduler(model, cache, max_running=max_running, max_prefill_tokens=1000)
    tested.submit(asked)
    order, most = [], 0.0
    while tested.busy:
        order += tested.step()
        load = tested.current_load()
        assert load.running + load.queued + len(order) == len(asked)
        assert load.kv_cache_usage <= 1
        most = max(most, load.kv_cache_usage)
    assert cache.usage == 0  # every page was given back
    return order, tested.current_load().retractions, most


LENGTHS = [5, 60, 31, 32, 33, 70, 8, 64]


def test_responses_are_the_same_where_requests_wait_and_are_put_back_for_want_of_room(model):
    wanted = requests(LENGTHS)
    _, none, _ = generated(model, wanted)
    found = requests(LENGTHS)
    _, some, most = generated(model, found, max_tokens=224)
    assert (none, most) == (0, 1.0)
    assert some > 0
    assert {request.finish_reason for request in found} == {"length"}
    for one, other in zip(found, wanted, strict=True):
        assert one.tokens == other.tokens
        assert torch.tensor(one.log_probs).allclose(torch.tensor(other.log_probs), atol=1e-4)


def test_who_came_first_is_never_put_back(model):
    asked = requests([40] * 6, responses=60)
    order, retractions, _ = generated(model, asked, max_tokens=224)
    assert retractions > 0
    assert order == asked  # all are as long as each other


def test_the_longest_request_fits_whatever_the_limit(model):
    (asked,) = requests([MAX_LEN - 40])
    _, retractions, most = generated(model, [asked], max_tokens=1)
    assert (len(asked.tokens), retractions, most) == (40, 0, 1.0)


def test_requests_with_one_prompt_share_its_pages(model):
    """64 tokens are two full pages, which eight share; each has a page of its own for what follows."""
    asked = requests([64] * 8, responses=20, prompts=[0] * 8)
    _, retractions, most = generated(model, asked, max_tokens=10 * 32)
    assert (retractions, most) == (0, 1.0)
    alone = requests([64], responses=20, prompts=[0])
    generated(model, alone)
    assert {tuple(request.tokens) for request in asked} == {tuple(alone[0].tokens)}
    assert [request.cached_tokens for request in asked] == [0] + [64] * 7


def test_a_prompt_is_shared_with_one_that_came_before_where_no_state_is_kept(model):
    cache = model.create_cache(4)
    tested = Scheduler(model, cache, max_running=4, max_prefill_tokens=1000)
    first, second = requests([40, 40], prompts=[0, 0])
    tested.submit([first])
    for _ in range(10):
        tested.step()
    tested.submit([second])
    while tested.busy:
        tested.step()
    assert second.tokens == first.tokens
    assert second.cached_tokens == (40 if cache.has_prefixes else 0)


def test_requests_that_are_cancelled_give_their_pages_back(model):
    cache = model.create_cache(4)
    tested = Scheduler(model, cache, max_running=4, max_prefill_tokens=1000)
    asked = requests([40, 50, 60])
    tested.submit(asked)
    tested.step()
    held = cache.usage
    asked[0].cancelled = asked[2].cancelled = True
    tested.step()
    assert cache.usage == held / 6 * 2  # 2, 2 and 2 pages
    kept = requests([40, 50, 60])[1]
    generated(model, [kept])
    while tested.busy:
        tested.step()
    assert asked[1].tokens == kept.tokens
    assert cache.usage == 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_no_numbers_are_said_with_the_version_of_the_weights(temperature):
    family = FAMILIES["llama"]
    architecture = family.architecture(CONFIGS["llama"]().to_dict() | {"model_type": family.model_type})
    broken = Decoder(family, architecture, max_length=MAX_LEN, dtype=torch.float32, device=CPU)
    broken.weights.load(
        {name: torch.full(shape, torch.nan) for name, shape in broken.weights.shapes().items()}
    )
    tested = Scheduler(broken, broken.create_cache(2), max_running=2, max_prefill_tokens=1000)
    tested.version = "7"
    params = SamplingParams(max_new_tokens=3, temperature=temperature)
    tested.submit(
        Request([1, 2, 3], params, seed=i, stop=StopRule(params, ByteTokenizer())) for i in range(2)
    )
    wanted = (
        "logits of 2 of 2 requests are not finite .the first is at token 3., with the weights of version 7"
    )
    with pytest.raises(ArithmeticError, match=wanted):
        tested.step()


@pytest.mark.parametrize("with_kernels", [True, False])
def test_after_a_step_that_failed_nothing_of_it_is_in_the_cache(with_kernels):
    """Masks hide what is finite, and NaN is not."""
    family = FAMILIES["llama"]
    architecture = family.architecture(CONFIGS["llama"]().to_dict() | {"model_type": family.model_type})
    decoder = Decoder(
        family, architecture, max_length=MAX_LEN, dtype=torch.float32, device=CPU, with_kernels=with_kernels
    )
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: torch.randn(shape, generator=generator) * 0.2
        for name, shape in decoder.weights.shapes().items()
    }
    decoder.weights.load(weights)
    tested = Scheduler(decoder, decoder.create_cache(4), max_running=4, max_prefill_tokens=1000)

    def run(length):
        (asked,) = requests([length], responses=3)
        tested.submit([asked])
        while tested.busy:
            tested.step()
        return asked.tokens

    wanted = run(5)
    decoder.weights.load({name: torch.full_like(tensor, torch.nan) for name, tensor in weights.items()})
    with pytest.raises(ArithmeticError):
        run(40)
    assert len(tested.recover()) == 1
    decoder.weights.load(weights)
    assert run(5) == wanted
