"""The environment `openenv` against a server of its protocol: episodes, rewards, refusals, and who shares what."""

from __future__ import annotations

import asyncio

import pytest
from slime_agents.environments.openenv import OpenEnv
from slime_agents.environments.openenv_session import OpenEnvError
from slime_core.errors import ConfigError, EnvironmentFailure
from slime_core.samples import Sample, Status
from slime_core.testing.contracts.environments import _Bytes, _played

from .openenv_server import Server, serving


def sample(index=0, **told):
    return Sample(
        index=index, group_index=0, prompt="?", tokens=[63], metadata={"openenv": told} if told else {}
    )


class EndsByBar(_Bytes):
    """The byte of `|` ends a sequence, and is spelled as any other."""

    eos_token_id = ord("|")


def played(server, *turns, given=None, tokenizer=None, **options):
    """Return a whole conversation, a token a byte."""

    async def main():
        async with serving(server) as url:
            said = [list(turn.encode()) for turn in turns]
            return await _played(
                lambda: OpenEnv(url=url, observation_field="text", **options),
                given or sample(),
                tokenizer or _Bytes(),
                said,
                None,
            )

    return asyncio.run(main())


@pytest.mark.parametrize("transport", ["socket", "http"])
def test_a_conversation_is_an_episode_and_what_the_server_says_is_masked(transport):
    server = Server()
    found = played(server, "9", " 5\n", "7", transport=transport, template=" {observation}. ")
    assert found.response == "Guess.\n9 lower.  5\n higher. 7 right. "
    assert "".join(map(str, found.loss_mask)) == "0" * 7 + "1" + "0" * 8 + "111" + "0" * 9 + "1" + "0" * 8
    assert (found.reward, found.status) == (1.0, Status.COMPLETED)
    record = found.metadata["multi_turn"]
    assert (record["turns"], record["ended_by"]) == (3, "done")
    if transport == "socket":
        assert server.told == [
            {"type": "reset", "data": {}},
            *({"type": "step", "data": {"message": guess}} for guess in ("9", "5", "7")),
            {"type": "close"},
        ]
        assert server.open == 0


def test_a_row_says_what_its_episode_is_reset_with():
    server = Server()
    assert played(server, "3", given=sample(seed=3), reset_args={"seed": 4, "level": 1}).reward == 1.0
    assert server.told[0]["data"] == {"seed": 3, "level": 1}


@pytest.mark.parametrize("transport", ["socket", "http"])
def test_a_malformed_action_is_answered_and_the_policy_may_try_again(transport):
    found = played(Server(), "x", "7", transport=transport)
    assert "no number" in found.response and found.reward == 1.0
    assert found.metadata["multi_turn"]["turns"] == 2


def test_an_action_may_be_a_part_of_the_turn_or_json():
    found = played(Server(), "I say 7", "I say <7>", action_regex="<(.*?)>")
    assert "error: no action: nothing matches <(.*?)>" in found.response and found.reward == 1.0
    found = played(Server(), "7", "[7]", "{", '{"message": "7"}', action_field="")
    assert [("error" in info) for info in found.metadata["multi_turn"]["info"]] == [True, True, True, False]
    assert found.reward == 1.0


def test_what_ends_a_turn_is_no_part_of_the_action():
    server = Server()
    assert played(server, "9|", "7|", tokenizer=EndsByBar()).reward == 1.0
    assert [told["data"]["message"] for told in server.told if told["type"] == "step"] == ["9", "7"]
    assert played(Server(), '{"message": "7"}|', tokenizer=EndsByBar(), action_field="").reward == 1.0


def test_a_server_that_pings_while_the_policy_speaks_is_answered():
    """One that is not would end the connection: uvicorn after 20 s."""
    server = Server()

    async def main():
        async with serving(server) as url:
            environment, own = OpenEnv(url=url), sample()
            try:
                await environment.reset(own)
                await asyncio.wait_for(server.ponged.wait(), 20)
                return (await environment.step(own, "7")).reward
            finally:
                await environment.close()

    assert asyncio.run(main()) == 1.0


@pytest.mark.parametrize("transport", ["socket", "http"])
def test_an_answer_has_no_deadline_beside_that_of_the_environment(transport):
    async def main():
        async with serving(Server()) as url:
            environment = OpenEnv(url=url, transport=transport)
            try:
                await environment.reset(sample())
                return environment._session._http.timeout.total
            finally:
                await environment.close()

    assert asyncio.run(main()) is None


def test_more_conversations_than_sessions_wait_for_each_other():
    """Five at once, two sessions: the server never has a third, and each guesses its own number."""
    server = Server(room=2)

    async def one(url, number):
        environment, own = OpenEnv(url=url), sample(number, seed=number)
        try:
            await environment.reset(own)
            await asyncio.sleep(0)
            return (await environment.step(own, str(number))).reward
        finally:
            await environment.close()

    async def main():
        async with serving(server) as url:
            return await asyncio.gather(*(one(url, number) for number in range(5)))

    assert asyncio.run(main()) == [1.0] * 5
    assert (server.most, server.open) == (2, 0)


def test_a_server_without_room_is_an_error_that_says_what_to_do():
    with pytest.raises(EnvironmentFailure, match=r"no session was free within 0.1 s .*max_concurrent_envs"):
        played(Server(room=0), "7", wait_s=0.1)


def test_a_server_that_fails_names_the_sample_and_itself():
    with pytest.raises(EnvironmentFailure, match=r"sample 0.*step failed: EXECUTION_ERROR: bad luck"):
        played(Server(), "13")


def test_a_server_that_is_not_there_is_named():
    async def main():
        environment = OpenEnv(url="http://127.0.0.1:9")
        try:
            await environment.reset(sample())
        finally:
            await environment.close()

    with pytest.raises(OpenEnvError, match=r"http://127.0.0.1:9/ws: .*is the server up"):
        asyncio.run(main())


def test_an_environment_that_others_use_too_is_found_out():
    """Two conversations by plain HTTP on a server with one environment; and one that makes a new environment for each request."""

    async def main(server):
        async with serving(server) as url:
            first, second = (OpenEnv(url=url, transport="http") for _ in range(2))
            try:
                await first.reset(sample(1))
                await second.reset(sample(2))
                await first.step(sample(1), "7")
            finally:
                await first.close()
                await second.close()

    for server in (Server(), Server(shares=True)):
        with pytest.raises(OpenEnvError, match=r"/state: found episode .*one conversation at a time"):
            asyncio.run(main(server))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"url": "127.0.0.1"}, "url: found '127.0.0.1'"),
        ({"template": "x"}, "template: found 'x'"),
        ({"action_regex": "a"}, "a group around the action"),
        ({"action_regex": "("}, "a regular expression"),
    ],
)
def test_options_are_checked(given, told):
    with pytest.raises(ConfigError, match=told):
        OpenEnv(**{"url": "http://a", **given})
