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


def played(say, *roles, context=None):
    engine = SayingEngine(say)
    generate = Roles(settings=AgentsSection(roles=list(roles)), resolve=resolve)
    runner = Generator(name="roles", function=generate, vocab_size=258, max_context_len=context)
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


#: What the template puts around a prompt of the user, a token a byte, each mark one token: `<|begin|>user\n`, `<|end|>\n` and
#: `<|begin|>assistant\n`.
AROUND = 6 + 2 + 11
#: Of the solver's, `Solve: 2 + 2`, and of the checker's, `Is 4 right for 2 + 2? {yes} or {no}`, without what the solver said.
SOLVES, CHECKS = AROUND + 12, AROUND + 34


@pytest.mark.parametrize("spare", [0, -1])
def test_roles_end_before_one_whose_prompt_leaves_no_token_and_those_so_far_are_samples(spare):
    context = CHECKS + 50 + spare
    samples, engine = played(lambda text: "y" * 50, SOLVER, CHECKER, WRITER, context=context)
    (solver,) = samples
    assert len(engine.requests) == 1
    assert (solver.status, solver.rollout_id, solver.response_length) == (Status.TRUNCATED, 4, 51)
    assert solver.metadata["roles"] == {
        "role": "solver",
        "said": {"solver": "y" * 50},
        "ended_by": "max_context_len",
        "not_reached": ["checker", "writer"],
    }


def test_a_role_whose_prompt_leaves_one_token_says_it():
    samples, _ = played(lambda text: "y" * 50, SOLVER, CHECKER, context=CHECKS + 51)
    assert [one.status for one in samples] == [Status.COMPLETED, Status.TRUNCATED]
    assert [one.response_length for one in samples] == [51, 1]
    assert "not_reached" not in samples[1].metadata["roles"]


def test_only_the_last_of_the_roles_so_far_is_cut_off():
    # The checker's prompt and answer are 53 + 50 and 51 tokens; the writer's prompt is of 19 + 4 x 50.
    writer = {"name": "writer", "prompt": "{solver}{checker}{solver}{checker}"}
    samples, _ = played(lambda text: "y" * 50, SOLVER, CHECKER, writer, context=AROUND + 200)
    assert [one.metadata["roles"]["role"] for one in samples] == ["solver", "checker"]
    assert [one.status for one in samples] == [Status.COMPLETED, Status.TRUNCATED]
    assert [one.metadata["roles"]["not_reached"] for one in samples] == [["writer"]] * 2


@pytest.mark.parametrize("spare", [0, -1])
def test_a_first_role_without_room_fails_its_sample_and_ends_no_run(spare):
    (sample,), engine = played(lambda text: "y", SOLVER, CHECKER, context=SOLVES + spare)
    told = f"sample 4: its prompt has {SOLVES} tokens, of at most {SOLVES + spare} with the answer"
    assert (sample.status, sample.failure.split(";")[0]) == (Status.FAILED, told)
    assert (list(sample.tokens), engine.requests) == ([50], [])


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
