"""Requests of several samples."""

import asyncio

import pytest
from slime_rm.remote.batches import Batches

pytestmark = pytest.mark.timeout(300)


def test_whatever_sending_a_batch_raises_reaches_all_that_wait_for_it():
    async def send(entries):
        raise KeyError(len(entries))

    async def main():
        batches = Batches(send, size=2, wait_s=60)
        return await asyncio.gather(batches.answer("a"), batches.answer("b"), return_exceptions=True)

    assert [repr(error) for error in asyncio.run(main())] == ["KeyError(2)"] * 2
