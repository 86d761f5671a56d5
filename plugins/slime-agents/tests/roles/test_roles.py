"""The generator `roles`: one prompt becomes a sample a role, which share a `rollout_id` and have rewards of their own."""

from __future__ import annotations

import asyncio

import pytest
from slime_agents.roles.roles import Roles
from slime_agents.roles.table import read_roles
from slime_agents.section import AgentsSection
from slime_core.errors import ConfigError
from slime_core.protocols import GenerateContext, SamplingParams
from slime_core.rollout.execution import Generator
from slime_core.samples import Sample, Status

from ..byte_chat import ByteChat, SayingEngine, last_of
from ..tools.playing import resolve

SOLVER = {"name": "solver", "prompt": "Solve: {task}", "reward": "exact"}
CHECKER = {"name": "checker", "prompt": "Is {solver} right for {task}? {{yes}} or {{no}}"}
WRITER = {
    "name": "writer",
    "prompt": "{task}: {solver}, {checker}",
    "train": False,
    "system_prompt": "Write.",
}


def played(say, *roles):
    engine = SayingEngine(say)
    generate = Roles(settings=AgentsSection(roles=list(roles)), resolve=resolve)
    runner = Generator(name="roles", function=generate, vocab_size=258, max_context_len=None)
    ctx = GenerateContext(engine=engine, tokenizer=ByteChat())
    sample = Sample(index=4, group_index=1, prompt="2 + 2", tokens=[50], label="4")
    return asyncio.run(runner.execute(ctx, sample, SamplingParams(max_new_tokens=100, seed=1))), engine


def test_each_role_hears_those_before_it_and_is_a_sample_of_one_execution():
    def say(text):
        asked = last_of(text, "user")
        return " 4 " if asked.startswith("Solve") else "yes" if asked.startswith("Is 4 right") else asked

    (solver, checker, writer), engine = played(say, SOLVER, CHECKER, WRITER)
    assert [one.rollout_id for one in (solver, checker, writer)] == [4, 4, 4]
    assert [one.custom_rm_path for one in (solver, checker, writer)] == ["exact", None, None]
    assert checker.metadata["roles"] == {
        "role": "checker",
        "said": {"solver": "4", "checker": "yes", "writer": "2 + 2: 4, yes"},
    }
    asked = ByteChat().decode(engine.requests[1][0])
    assert "Is 4 right for 2 + 2? {yes} or {no}" in asked
    assert ByteChat().decode(engine.requests[2][0]).startswith("system\nWrite.")
    assert solver.effective_response_length == 4
    assert (checker.effective_response_length, writer.effective_response_length) == (4, 0)


def test_an_abort_gives_the_prompt_back():
    answers = iter(["4", None])
    (sample,), _ = played(lambda text: next(answers), SOLVER, CHECKER)
    assert sample.status is Status.ABORTED
    assert list(sample.tokens) == [50]


@pytest.mark.parametrize(
    ("roles", "told"),
    [
        ([], "agents.roles: found none"),
        ([{"name": "a"}], "no prompt"),
        ([SOLVER, SOLVER], "the name 'solver'"),
        ([CHECKER], "{solver} in its prompt; wanted {task}, or a role before it: none"),
        ([{**SOLVER, "colour": "red"}], "the key 'colour'"),
        ([{**SOLVER, "train": "no"}], "train = 'no'; wanted bool"),
        ([{**SOLVER, "prompt": "{task"}], "cannot be read"),
    ],
)
def test_a_wrong_role_is_refused_by_name(roles, told):
    with pytest.raises(ConfigError) as raised:
        read_roles(roles)
    assert told in str(raised.value)
