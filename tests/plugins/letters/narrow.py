"""An engine with a context of a few tokens, which refuses what is longer as SGLang does, and a generator that fills it."""

from __future__ import annotations

from slime_core.config.factories import EngineFactory
from slime_core.errors import EngineError
from slime_core.testing.tabular import TabularEngine

CONTEXT = 7


class NarrowEngine(TabularEngine):
    """Refuses requests for more tokens than its context has room for."""

    async def generate(self, tokens, params, *, session_id=None):
        if len(tokens) + params.max_new_tokens > CONTEXT:
            raise EngineError(f"{len(tokens)} + {params.max_new_tokens} tokens; wanted at most {CONTEXT}")
        return await super().generate(tokens, params, session_id=session_id)


#: The engine of the runs.
create_engine = EngineFactory(lambda build: NarrowEngine(), NarrowEngine.capabilities, lambda build: CONTEXT)


async def reads_first(ctx, sample, params):
    """Read four letters of an environment, and answer."""
    ctx.append(sample, "abcd")
    await ctx.turn(sample, params)
    return sample
