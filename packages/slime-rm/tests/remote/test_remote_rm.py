"""`remote_rm` against a real server that is well, down, slow, broken or talks nonsense."""

import asyncio
import json
import socket

import pytest
from slime_core.errors import ConfigError
from slime_core.rewards.pool import RewardPool
from slime_core.rewards.workers.calling import build_reward
from slime_core.rundir.served_models import write_addresses
from slime_core.samples import Sample
from slime_rm.remote.remote_rm import RemoteReward

from .calls import asked

pytestmark = pytest.mark.timeout(300)


REMOTE = "slime_rm.remote.remote_rm:RemoteReward"


def scored(reference, options, samples, *, timeout_s=20.0):
    async def main():
        async with RewardPool(reference, options, workers=1, timeout_s=timeout_s) as pool:
            return await asyncio.gather(*(pool.score(sample) for sample in samples))

    return asyncio.run(main())


def remote(server, samples, **options):
    options = {"rm_url": server.url, "first_wait_s": 0.01} | options
    return asked(RemoteReward, options, samples)


def test_the_servers_number_is_the_reward(server):
    server.answer = lambda number, path, body: (200, json.dumps(len(body["response"])))
    results = remote(server, [Sample(prompt="p", response="four", label="l"), Sample(response="x")])
    assert results == [4, 1]
    assert {"prompt": "p", "response": "four", "label": "l"} in [body for _, body, _ in server.requests]


def test_the_servers_of_a_model_of_the_run_are_asked_in_turn(server, tmp_path):
    write_addresses(tmp_path, "judge", [f"{server.url}/a", f"{server.url}/b"])
    samples = [Sample(response=str(number)) for number in range(4)]
    assert (
        remote(server, samples, rm_url="served:judge/rm", run_dir=str(tmp_path), connections=1) == [1.0] * 4
    )
    assert [path for path, *_ in server.requests] == ["/a/rm", "/b/rm", "/a/rm", "/b/rm"]


def test_a_server_of_the_run_is_sent_its_key_and_no_other_server_is(server, tmp_path):
    write_addresses(tmp_path, "judge", [server.url], key="secret")
    assert remote(server, [Sample()], rm_url="served:judge", run_dir=str(tmp_path)) == [1.0]
    assert remote(server, [Sample()], run_dir=str(tmp_path)) == [1.0]
    sent = [headers.get("Authorization") for _, _, headers in server.requests]
    assert sent == ["Bearer secret", None]


def test_a_server_that_comes_back_elsewhere_is_found(server, tmp_path):
    write_addresses(tmp_path, "judge", [])
    options = {"rm_url": "served:judge", "run_dir": str(tmp_path), "tries": 2}
    (error,) = remote(server, [Sample()], **options)
    assert str(error).startswith(
        "served:judge: no answer after 2 tries (the last: ConnectionError none of its"
    )

    def moves(number, path, body):
        write_addresses(tmp_path, "judge", [server.url])
        return 503, "gone"

    write_addresses(tmp_path, "judge", [f"{server.url}/old"])
    server.answer = lambda number, path, body: moves(number, path, body) if path == "/old" else (200, "2.0")
    assert remote(server, [Sample()], **options) == [2.0]


def test_a_model_that_the_run_does_not_serve_is_refused(tmp_path):
    with pytest.raises(
        ConfigError, match=r"served:judge/v1: found no .*/served/judge\.json; wanted a model that"
    ):
        build_reward(RemoteReward, {"rm_url": "served:judge/v1", "run_dir": str(tmp_path)})
    with pytest.raises(ConfigError, match="found no run; wanted a run that serves it"):
        build_reward(RemoteReward, {"rm_url": "served:judge"})


def test_the_servers_object_is_a_dict_of_rewards(server):
    server.answer = lambda number, path, body: (200, '{"score": 0.5, "style": 2, "seen": ["x"]}')
    assert remote(server, [Sample()]) == [{"score": 0.5, "style": 2, "seen": ["x"]}]


def test_metadata_is_sent_when_asked_for(server):
    remote(server, [Sample(metadata={"level": 3})], send_metadata=True)
    assert server.requests[0][1]["metadata"] == {"level": 3}


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_server_that_stumbles_is_asked_again(server, status):
    server.answer = lambda number, path, body: (status, "busy") if number < 3 else (200, "1")
    assert remote(server, [Sample()]) == [1]
    assert len(server.requests) == 3


def test_a_server_that_stays_broken_is_one_error_that_names_the_sample(server):
    server.answer = lambda number, path, body: (500, "out of memory")
    options = {"rm_url": server.url, "first_wait_s": 0.01, "tries": 3}
    (failure,) = scored(REMOTE, options, [Sample(index=7)])
    assert failure.message.startswith(
        f"sample 7: reward {REMOTE} raised RewardError: {server.url}: no answer after 3"
    )
    assert "the last: status 500, 'out of memory'" in failure.message
    assert len(server.requests) == 3


def test_what_a_server_refuses_is_not_asked_again(server):
    server.answer = lambda number, path, body: (422, "no label")
    (error,) = remote(server, [Sample()])
    assert str(error) == f"{server.url}: refused with status 422, 'no label'"
    assert len(server.requests) == 1


def test_a_server_that_is_down_is_one_error():
    with socket.socket() as held:  # nobody else listens there meanwhile
        held.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        options = {"rm_url": url, "tries": 2, "first_wait_s": 0.01}
        (error,) = asked(RemoteReward, options, [Sample()])
    assert str(error).startswith(f"{url}: no answer after 2 tries (the last: ConnectError")


def test_a_slow_server_misses_the_deadline_of_each_try(server):
    server.answer = server.stuck
    (error,) = remote(server, [Sample()], tries=2, request_timeout_s=0.1)
    assert "no answer after 2 tries (the last: " in str(error)
    assert "Timeout" in str(error)


def test_a_slow_server_misses_the_deadline_of_the_pool(server):
    server.answer = server.stuck
    (failure,) = scored(REMOTE, {"rm_url": server.url}, [Sample(index=7)], timeout_s=0.2)
    assert failure.kind == "deadline"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<html>", "answered '<html>'; wanted JSON"),
        ("", "wanted JSON"),
        ('"1.0"', "answered '1.0'; wanted a number or an object"),
        ("null", "wanted a number or an object"),
        ("[1.0]", "wanted a number or an object"),
        ("x" * 5000, "wanted JSON"),
    ],
)
def test_nonsense_is_an_error_that_shows_it(server, text, words):
    server.answer = lambda number, path, body: (200, text)
    (error,) = remote(server, [Sample()])
    assert words in str(error)
    assert len(str(error)) < 500
    assert len(server.requests) == 1


def test_a_number_that_is_none_is_an_error_that_names_the_sample(server):
    server.answer = lambda number, path, body: (200, '{"score": NaN}')
    (failure,) = scored(REMOTE, {"rm_url": server.url}, [Sample(index=7)])
    assert failure.message.startswith("sample 7: ")
    assert "returned nan at ['score']" in failure.message


def test_samples_go_in_batches_and_each_gets_its_own_reward(server):
    server.answer = lambda number, path, body: (200, json.dumps([len(one["response"]) for one in body]))
    results = remote(server, [Sample(response="x" * i) for i in range(10)], batch_size=4)
    assert results == list(range(10))
    assert sorted(len(body) for _, body, _ in server.requests) == [2, 4, 4]


def test_what_a_server_refuses_of_a_batch_fails_alone(server):
    def answer(number, path, body):
        return (
            (400, "too long")
            if "long" in [one["response"] for one in body]
            else (200, json.dumps([1.0] * len(body)))
        )

    server.answer = answer
    first, error, last = remote(server, [Sample(), Sample(response="long"), Sample()], batch_size=3)
    assert (first, last) == (1.0, 1.0)
    assert str(error) == f"{server.url}: refused with status 400, 'too long'"


@pytest.mark.parametrize("text", ["[1.0]", "1.0", '{"rewards": [1, 2]}'])
def test_a_batch_that_is_answered_with_another_number_of_rewards_fails_each_sample(server, text):
    server.answer = lambda number, path, body: (200, text)
    errors = remote(server, [Sample(), Sample()], batch_size=2)
    assert len(errors) == 2
    assert all("to 2 samples; wanted a list of one each" in str(error) for error in errors)


def test_one_bad_entry_of_a_batch_fails_its_sample_alone(server):
    server.answer = lambda number, path, body: (200, '[1.0, "good"]')
    good, bad = remote(server, [Sample(), Sample()], batch_size=2)
    assert good == 1.0
    assert "answered 'good'; wanted a number or an object" in str(bad)


def test_a_missing_address_stops_the_start_of_the_pool():
    with pytest.raises(ConfigError, match="give --rm-url"):
        scored(REMOTE, {"rm_url": None}, [])


def test_a_response_is_sent_without_the_special_tokens_at_its_end(server):
    samples = [Sample(response="four</s>"), Sample(response="a <|im_end|> b\n")]
    assert remote(server, samples, connections=1) == [1.0, 1.0]
    assert [body["response"] for _, body, _ in server.requests] == ["four", "a <|im_end|> b\n"]


@pytest.mark.parametrize(
    "url", ["http://a:99999", "http://a:port/x", "https://:80", "http://a:0", "http://[::1"]
)
def test_an_address_that_cannot_be_one_is_refused_by_its_form(url):
    with pytest.raises(ConfigError, match="wanted http://HOST:PORT, or served:NAME"):
        build_reward(RemoteReward, {"rm_url": url})


@pytest.mark.parametrize("url", ["http://a", "https://a:65535/x", "http://[::1]:80/"])
def test_an_address_that_can_be_one_is_taken(url):
    assert build_reward(RemoteReward, {"rm_url": url})


def test_a_server_that_nobody_ever_reached_is_tried_once_after_a_request_gave_up(server):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"

    async def main():
        reward = build_reward(RemoteReward, {"rm_url": url, "tries": 3, "first_wait_s": 0.01})
        said = []
        for _ in range(2):
            said += await asyncio.gather(reward(Sample()), return_exceptions=True)
        await reward.close()
        return [str(error) for error in said]

    first, second = asyncio.run(main())
    assert "no answer after 3 tries (the last: ConnectError" in first
    assert "no answer after 1 tries (the last: ConnectError" in second
