"""Which devices hold what, what does not fit, and the cheapest changes after which it does."""

from __future__ import annotations

from pathlib import Path

import pytest
from slime_core.config.build import MemoryQuestion
from slime_core.config.load import load_settings
from slime_core.config.memory import predict, remedies
from slime_core.plugins.registry import Registry
from slime_core.protocols.memory import Device

pytestmark = pytest.mark.usefixtures("memory_parts")
MIB = 2**20


TRAINS, GENERATES, UPDATED = (
    f"the GPU of trainer and engine while {what}"
    for what in ("it trains", "it generates", "weights are updated")
)


def predicted(
    *flags: str,
    memory: int | None,
    kind: str = "cuda",
    engine: str = "memory_parts:engine",
    trainer: str = "memory_parts:trainer",
):
    """Of a trainer with 100 MiB of weights and 400 of activations, and an engine with 50 and 100."""
    registry = Registry()
    settings = load_settings(
        [],
        [
            *("--hf-checkpoint", "m", "--rollout-batch-size", "100", "--rollout-max-response-len", "8"),
            *("--train-backend", trainer, "--rollout-engine", engine),
            *("--max-tokens-per-gpu", "400", *flags),
        ],
        registry=registry,
    )
    device = Device(kind=kind, memory_bytes=None if memory is None else memory * MIB)
    return predict(
        MemoryQuestion(
            settings=settings, registry=registry, model_path=Path(), device=device, prompt_tokens=7
        )
    )


def uses(prediction):
    return {use.where: use.used_bytes // MIB for use in prediction.uses}


@pytest.mark.parametrize("loop", ["sync", "slime-core/sync"])
def test_while_it_generates_the_activations_are_not_there(loop):
    assert uses(predicted("--loop", loop, memory=None)) == {TRAINS: 500 + 150, GENERATES: 100 + 150}


def test_where_it_generates_while_it_trains_all_is_there_at_once():
    assert uses(predicted("--loop", "one-step-off", memory=None)) == {TRAINS: 650, GENERATES: 650}


def test_an_engine_beyond_the_ranks_gpus_has_its_own():
    found = predicted("--actor-num-gpus-per-node", "2", "--max-staleness", "2", memory=None)
    assert uses(found) == {"trainer": 500, "engine": 150}


def test_an_engine_on_a_ranks_gpu_takes_of_its_memory():
    found = predicted("--actor-num-gpus-per-node", "2", "--max-staleness", "1", memory=None)
    assert uses(found) == {TRAINS: 650, GENERATES: 250}


@pytest.mark.parametrize(("gpu", "beside", "alone"), [(0, "stage 0", "stage 1"), (1, "stage 1", "stage 0")])
@pytest.mark.parametrize("of_each", ["nodes", "gpus-per-node"])
def test_an_engine_is_beside_the_stage_whose_gpu_it_has(gpu, beside, alone, of_each):
    flags = (f"--actor-num-{of_each}", "2", "--max-staleness", str(gpu))
    found = predicted(*flags, memory=None, trainer="memory_parts:staged_trainer")
    where = f"the GPU of {beside} and engine while it"
    assert uses(found) == {f"{where} trains": 650, f"{where} generates": 250, alone: 500}


def test_what_is_offloaded_leaves_what_stays():
    """The trainer's weights are there while it generates; nothing of the engine is while it trains."""
    assert uses(predicted("--colocate", memory=None)) == {
        TRAINS: 500,
        UPDATED: 100 + 50,
        GENERATES: 100 + 150,
    }
    assert uses(predicted("--offload-rollout", memory=None)) == {TRAINS: 500, GENERATES: 100 + 150}


def test_weights_that_leave_are_there_at_an_update():
    leaving = {"trainer": "memory_parts:leaving_trainer", "memory": None}
    assert uses(predicted("--colocate", **leaving)) == {TRAINS: 500, UPDATED: 100 + 50, GENERATES: 150}
    assert uses(predicted("--offload-train", **leaving)) == {TRAINS: 650, GENERATES: 100 + 150}
    filling = predicted("--colocate", **leaving | {"memory": 1000}, engine="memory_parts:filling_engine")
    assert uses(filling)[GENERATES] == 500  # half of all


def test_an_engine_fills_its_share_of_what_is_free_when_it_starts():
    """Half of the 900 MiB beside the trainer's weights."""
    found = predicted(memory=1000, engine="memory_parts:filling_engine")
    assert uses(found) == {TRAINS: 500 + 450, GENERATES: 100 + 450}
    found = predicted("--colocate", memory=1000, engine="memory_parts:filling_engine")
    assert uses(found) == {TRAINS: 500, UPDATED: 150, GENERATES: 100 + 450}


def test_an_engine_whose_share_is_too_small_for_it_does_not_fit():
    """Of 390 MiB 290 are free: half of them is less than the 150 that it needs, which are half of 300."""
    found = predicted("--colocate", memory=390, engine="memory_parts:filling_engine")
    assert uses(found)[GENERATES] == 100 + 300


def test_a_cpu_has_one_memory_for_all_processes():
    ranks = ("--actor-num-gpus-per-node", "3")
    found = predicted(*ranks, memory=None, kind="cpu")
    assert uses(found) == {"this machine: all ranks and engines": 3 * (500 + 10) + 150}
    found = predicted(*ranks, "--colocate", memory=None, kind="cpu")
    assert uses(found) == {"this machine: all ranks and engines": 3 * (500 + 10)}


def test_each_of_several_machines_has_its_share_of_the_ranks():
    found = predicted("--actor-num-nodes", "2", memory=None, kind="cpu")
    assert uses(found) == {"this machine: all ranks and engines": 500 + 10 + 150}


@pytest.mark.parametrize(("memory", "certain"), [(650, False), (649, False), (450, False), (449, True)])
def test_what_does_not_fit_with_short_samples_either_is_certain(memory, certain):
    """100 samples of 2 tokens have 200, and take 100 + 200 MiB beside the engine's 150."""
    assert predicted(memory=memory).is_certain is certain


def test_an_engine_that_predicts_nothing_takes_nothing():
    assert uses(predicted(memory=None, engine="none")) == {"trainer": 500}


@pytest.mark.parametrize(("memory", "fits"), [(None, True), (650, True), (649, False)])
def test_what_is_more_than_the_memory_does_not_fit(memory, fits):
    assert predicted(memory=memory).fits is fits


def test_the_longest_sample_is_prompt_and_response_up_to_the_context():
    assert predicted(memory=None).question.longest_sample == 15
    assert predicted("--rollout-max-context-len", "12", memory=None).question.longest_sample == 12


def test_remedies_are_those_that_are_enough_alone_cheapest_first_and_those_that_want_more_last():
    """650 MiB: half the micro-batch leaves 450, a quarter 350, in turns 500, half the requests 600."""
    found = remedies(predicted(memory=600))
    assert [remedy.text for remedy, _ in found] == [
        "--max-tokens-per-gpu 200",
        "--rollout-batch-size 50",
        "--max-tokens-per-gpu 100",
    ]
    assert [uses(after)[TRAINS] for _, after in found] == [450, 600, 350]
    assert [remedy.text for remedy, _ in remedies(predicted(memory=600), most=4)][-1] == "--colocate"


def test_where_fewer_than_three_changes_are_enough_alone_several_are_joined():
    """409 MiB: a quarter of the micro-batch leaves 350; then 12 prompts of 15 tokens: 100 + 180 + 50 + 12."""
    (alone, _), (joined, after), *_ = remedies(predicted(memory=409))
    assert alone.text == "--max-tokens-per-gpu 100"
    assert joined.text == "--rollout-batch-size 12"
    assert uses(after)[TRAINS] == 342


def test_several_changes_are_joined_where_none_is_enough():
    """250 MiB: 100 + 50 of weights stay, so that 100 are left of the 500 others."""
    (remedy, after), *_ = remedies(predicted(memory=250))
    assert after.fits
    assert len(remedy.flags) > 1
    assert remedy.flags.keys() <= {"--max-tokens-per-gpu", "--rollout-batch-size", "--colocate"}
    settings = after.question.settings
    assert remedy.flags["--max-tokens-per-gpu"] == str(settings.train.max_tokens_per_gpu)


def test_what_saves_most_is_said_where_nothing_is_enough():
    ((remedy, after),) = remedies(predicted(memory=99))
    assert not after.fits
    assert after.missing_bytes < predicted(memory=99).missing_bytes
    assert remedy.text
