"""`slime bench overlap`: real runs whose responses are as long in every loop."""

from __future__ import annotations

import asyncio
import json

import pytest
from slime_bench.overlap import LOOPS, as_long_as_drawn, overlap
from slime_core.protocols import GenerateContext, SamplingParams
from slime_core.samples import Sample
from slime_core.testing.tabular import TabularEngine, load_tokenizer


def length(index, tmp_path):
    """The length that the generator asks the engine for."""
    asked = []

    class Asked(TabularEngine):
        async def generate(self, tokens, params, **more):
            asked.append((params.min_new_tokens, params.max_new_tokens))
            return await super().generate(tokens, params, **more)

    ctx = GenerateContext(engine=Asked(), tokenizer=load_tokenizer(tmp_path))
    sample = Sample(index=index, group_index=0, prompt="a", tokens=[0])
    params = SamplingParams(max_new_tokens=160, stop=("a",))
    asyncio.run(as_long_as_drawn(ctx, sample, params, median=16))
    ((least, most),) = asked
    assert least == most
    return most


def test_lengths_are_those_of_the_samples_number_and_have_a_long_tail(tmp_path):
    drawn = [length(index, tmp_path) for index in range(400)]
    assert drawn == [length(index, tmp_path) for index in range(400)]
    assert 13 <= sorted(drawn)[200] <= 19
    assert max(drawn) > 80


@pytest.mark.faults
@pytest.mark.slow
def test_it_trains_and_says_how_idle_its_parts_are(capsys, monkeypatch):
    for loop in ("sync", "one-step-off"):
        monkeypatch.delitem(LOOPS, loop)
    words = [
        "--engine",
        "torch",
        "--steps",
        "1",
        "--prompts",
        "2",
        "--samples",
        "2",
        "--median",
        "2",
        "--json",
    ]
    assert overlap(words) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert found["loop"] == "fully-async"
    assert found["samples_per_s"] * found["step_s"] == pytest.approx(4)
    assert 0 <= found["engine_idle"] <= 1
    assert 0 <= found["trainer_idle"] < 1
    assert (
        found["staleness"] == 2
    )  # of seven steps the fourth is measured: submitted once the first was trained, as the bound allows
