"""Versions of the weights of what was generated while they changed: each token's where it is told, or else the oldest."""

from __future__ import annotations

import asyncio

import pytest
from slime_compat.adapters.generate import ReferenceGenerate
from slime_core.protocols import Completion, GenerateContext, SamplingParams
from slime_core.samples import Sample
from slime_core.testing.tabular import load_tokenizer


class Updating:
    """Answers two tokens, between which the weights change."""

    def __init__(self):
        self.version = 9

    async def generate(self, tokens, params, *, session_id=None, images=()):
        before, self.version = self.version, self.version + 1
        spans = [
            {"version": str(before), "start": 0, "end": 1},
            {"version": str(self.version), "start": 1, "end": 2},
        ]
        return Completion(
            tokens=[2, 3],
            log_probs=[-0.5, -0.25],
            finish_reason="stop",
            weight_version=str(self.version),
            metadata={"weight_versions": spans},
        )


def generated(function):
    async def main():
        context = GenerateContext(engine=Updating(), tokenizer=load_tokenizer(""))
        generate = ReferenceGenerate(path=f"spanning_updates:{function}")
        sample = Sample(index=0, prompt="a", tokens=[1])
        try:
            return await generate(context, sample, SamplingParams(max_new_tokens=2))
        finally:
            for service in context.services.values():
                await service.close()

    return asyncio.run(main())


def test_tokens_that_are_appended_have_the_versions_that_generated_them():
    sample = generated("appending")
    assert sample.weight_versions == ["9", "10", "10", "11"]
    assert sample.weight_version_starts == [0, 1, 2, 3]


@pytest.mark.parametrize("function", ["by_hand", "by_hand_with_versions", "by_another_client"])
def test_fields_that_are_written_by_hand_have_the_oldest_version_of_the_call(function):
    sample = generated(function)
    assert (sample.weight_versions, sample.weight_version_starts) == (["9"], [0])
