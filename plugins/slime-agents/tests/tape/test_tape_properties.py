"""Whatever is said: each id that was sampled is trained on once, at its place, and nothing forks that did not change."""

from __future__ import annotations

import asyncio
import copy
import random

import pytest
from slime_agents.tape.messages import normal
from slime_agents.tape.tape import Tape
from slime_agents.tape.template import ChatTemplate
from slime_core.protocols import GenerateContext, SamplingParams
from slime_core.samples import Sample

from .chat_templates import TEMPLATES
from .conftest import FORMATS
from .scripted import ScriptedEngine, a_turn, answers, echo

TOOLS = [
    {"type": "function", "function": {"name": name, "description": "looks", "parameters": {"type": "object", "properties": {}}}}
    for name in ("look", "run_code")
]  # fmt: skip
N_CONVERSATIONS = 1000


def built(tokenizer_of, name):
    tokenizer, also = tokenizer_of(name)
    return tokenizer, also, ChatTemplate(tokenizer, known=tuple(FORMATS.values()))


async def converse(rng, tokenizer, also, template, *, changes):
    """Play one conversation; returns its tape, the engine, and how often the client changed its history."""
    engine = ScriptedEngine()
    ends = (tokenizer.eos_token_id, *also)
    is_asked = rng.random() < 0.5  # else the model's folder says so
    tokenizer = copy.copy(tokenizer)  # which other tests have, too
    tokenizer.eos_token_ids = frozenset() if is_asked else frozenset(also)
    params = SamplingParams(max_new_tokens=10_000, stop_token_ids=also if is_asked else ())
    ctx = GenerateContext(engine=engine, tokenizer=tokenizer)
    tape = Tape(ctx, Sample(index=5), params, template=template, name="s")
    tools = TOOLS if rng.random() < 0.7 else None
    history = [{"role": "system", "content": "Be brief."}] * rng.randint(0, 1) + [
        {"role": "user", "content": "begin"}
    ]
    n_changes = 0
    for _ in range(rng.randint(1, 6)):
        engine.next.append(a_turn(rng, tokenizer, template.tool_format, ends, with_tools=tools is not None))
        turn = await tape.turn([normal(message) for message in history], tools)
        history += [echo(rng, turn.message), *answers(rng, turn.message)]
        users = [i for i, one in enumerate(history) if one["role"] == "user"]
        if changes and rng.random() < 0.3:
            i = rng.choice(users)
            history = [*history[:i], {"role": "user", "content": f"something else {rng.random()}"}]
            n_changes += i < len(history) or True
    return tape, engine, n_changes


def check(tape, engine):
    samples = tape.samples()
    places = {}
    for number, sample in enumerate(samples):
        sample.check()
        tokens, mask = list(sample.tokens), list(sample.loss_mask or [1] * sample.response_length)
        for i in range(sample.response_length):
            if mask[i]:
                log_prob = sample.rollout_log_probs[i]
                assert log_prob not in places, "an id is trained on twice"
                places[log_prob] = (number, sample.prompt_length + i, tokens[sample.prompt_length + i])
            else:
                assert sample.rollout_log_probs[i] == 0.0
    assert len(places) == sum(len(request.ids) for request in engine.requests)
    for request in engine.requests:
        for i, (token, log_prob) in enumerate(zip(request.ids, request.log_probs, strict=True)):
            number, position, trained = places[log_prob]
            assert trained == token
            assert position == len(request.prompt) + i
        sample = samples[places[request.log_probs[0]][0]]
        assert list(sample.tokens[: len(request.prompt)]) == request.prompt


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_sampled_id_is_trained_once_at_its_place_and_nothing_forks(tokenizer_of, name):
    tokenizer, also, template = built(tokenizer_of, name)
    for seed in range(N_CONVERSATIONS):
        tape, engine, _ = asyncio.run(converse(random.Random(seed), tokenizer, also, template, changes=False))
        check(tape, engine)
        assert tape.forks == [], f"seed {seed}: {tape.forks}"
        assert len(tape.samples()) == 1


@pytest.mark.parametrize("name", TEMPLATES)
def test_forks_are_where_the_client_changed_its_history_and_share_what_came_before(tokenizer_of, name):
    tokenizer, also, template = built(tokenizer_of, name)
    for seed in range(200):
        tape, engine, n_changes = asyncio.run(
            converse(random.Random(seed), tokenizer, also, template, changes=True)
        )
        check(tape, engine)
        assert len(tape.forks) <= n_changes
        for fork in tape.forks:
            assert fork.reason
            if fork.parent is not None:
                parent, child = tape.branches[fork.parent].sample, tape.branches[fork.branch].sample
                n = fork.shared_tokens
                assert list(parent.tokens[:n]) == list(child.tokens[:n])
                assert child.prompt_length >= n


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_format_of_calls_is_the_one_that_the_template_writes(tokenizer_of, name):
    _, _, template = built(tokenizer_of, name)
    assert template.tool_format is FORMATS[TEMPLATES[name].tool_format]
