"""The environment `search`: what it finds, what it says, what it rewards, and that retrieved text is not trained on."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from slime_agents.search.environment import Search
from slime_agents.search.index import Bm25Index, Indices
from slime_agents.search.passages import Passage, read_passages
from slime_core.config.sections import EnvironmentSection
from slime_core.errors import ConfigError, DataError, EnvironmentFailure, RewardError, SampleError
from slime_core.protocols import GenerateContext, SamplingParams
from slime_core.rollout.generators.multi_turn import converse
from slime_core.runtime.closing import close_all
from slime_core.samples import Sample, Status
from slime_core.testing.contracts import check_environment
from slime_core.testing.contracts.environments import _Bytes, _played

ROWS = [
    {"title": "Paris", "text": "Paris is the capital of France, on the river Seine."},
    {"title": "Berlin", "text": "Berlin is the capital of Germany, on the river Spree."},
    {"id": 3, "contents": '"Rhine"\nThe Rhine is a river of Germany, Germany and Germany.'},
    {"text": "Bread is made of flour."},
]
CAPITAL = "I look. <search>capital of France</search>"


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "passages.jsonl"
    path.write_text("\n".join(map(json.dumps, ROWS)) + "\n\n")
    return str(path)


def said(environment, *turns, label="Paris", status=Status.COMPLETED):
    """Return what the environment answers to each turn."""

    async def main():
        sample, services = Sample(index=0, label=label, status=status), {}
        environment.use(services)
        await environment.reset(sample)
        try:
            return [await environment.step(sample, turn) for turn in turns]
        finally:
            await environment.close()
            await close_all(list(services.values()))

    return asyncio.run(main())


def test_passages_are_found_by_their_words_best_first_and_ties_by_their_order(corpus):
    index = Bm25Index(Path(corpus))
    assert [each.title for each in index.search("the capital of France", 3)] == ["Paris", "Berlin"]
    # Once each in texts of as many words: the first of the file; three times in the third.
    assert [each.title for each in index.search("river", 2)] == ["Paris", "Berlin"]
    assert index.search("Germany?", 1)[0].title == "Rhine"
    assert index.search("zebra", 3) == index.search("the of", 3) == index.search("", 3) == []


def test_conversations_that_begin_at_once_share_one_index_and_one_that_gives_up_leaves_it_to_the_others(
    corpus,
):
    async def main():
        indices = Indices()
        asked = [asyncio.create_task(indices.of(Path(corpus))) for _ in range(16)]
        await asyncio.sleep(0)
        asked[0].cancel()
        ended = await asyncio.gather(*asked, return_exceptions=True)
        return ended, await indices.of(Path(corpus))

    (gave_up, *found), later = asyncio.run(main())
    assert isinstance(gave_up, asyncio.CancelledError)
    assert len({id(index) for index in [*found, later]}) == 1
    assert later.search("Paris", 1)[0].title == "Paris"


def test_an_index_that_takes_longer_than_the_deadline_says_which_one_to_raise(tmp_path):
    path = tmp_path / "corpus.jsonl"
    os.mkfifo(path)  # reading it waits for a writer

    async def main():
        given = Sample(index=5, group_index=0, prompt="?", tokens=[63], label="x")
        ctx, params = GenerateContext(engine=None, tokenizer=_Bytes()), SamplingParams(max_new_tokens=9)
        settings = EnvironmentSection(environment_timeout_s=0.05)
        try:
            await converse(
                ctx,
                given,
                params,
                settings=settings,
                name="search",
                create=lambda _: Search(corpus=str(path)),
            )
        finally:
            await close_all(list(ctx.services.values()))

    try:
        with pytest.raises(
            EnvironmentFailure, match=r"sample 5: .* reset gave no answer within 0.05 s"
        ) as failed:
            asyncio.run(main())
    finally:
        os.close(os.open(path, os.O_RDWR))
    (note,) = failed.value.__notes__
    assert note.startswith(f"the index of {path} was still being built; raise --environment-timeout-s")


def test_a_query_is_answered_by_passages_in_tags(corpus):
    (found, nothing) = said(Search(corpus=corpus, topk=2), CAPITAL + "\n", "<search>zebra</search>")
    assert found.content == (
        "\n\n<information>Doc 1 (Title: Paris): Paris is the capital of France, on the river Seine.\n"
        "Doc 2 (Title: Berlin): Berlin is the capital of Germany, on the river Spree.</information>\n\n"
    )
    assert (found.done, found.reward, found.info) == (False, 0.0, {"query": "capital of France", "found": 2})
    assert nothing.content == "\n\n<information>Nothing was found.</information>\n\n"


@pytest.mark.parametrize(
    ("answer", "label", "reward"),
    [
        ("Paris", "Paris", 1.0),
        (" the PARIS. ", "Paris", 1.0),
        ("Paris, France", "Paris", 0.0),
        ("City of Light", '["Paris", "The City of Light"]', 1.0),
        ("Lyon", '["Paris", "The City of Light"]', 0.0),
        ("1,2", "[1, 2", 0.0),
        ("3", "3", 1.0),
    ],
)
def test_an_answer_ends_the_conversation_and_is_held_against_the_label(corpus, answer, label, reward):
    (last,) = said(Search(corpus=corpus), f"<answer>no</answer> or <answer>{answer}</answer>", label=label)
    assert (last.done, last.reward, last.info) == (True, reward, {"answer": answer.strip()})


@pytest.mark.parametrize(
    "turn", ["", "Paris", "<search></search>", "</search>", "<search>Paris", CAPITAL + " more"]
)
def test_a_turn_that_is_neither_is_told_so(corpus, turn):
    (told,) = said(Search(corpus=corpus), turn)
    assert "neither a search nor an answer" in told.content
    assert (told.done, told.reward) == (False, 0.0)


def test_a_turn_that_was_cut_off_is_not_answered(corpus):
    (last,) = said(Search(corpus=corpus), CAPITAL, status=Status.TRUNCATED)
    assert (last.done, last.content, last.reward) == (True, "", 0.0)


def test_it_scores_only_if_asked_and_then_wants_a_label(corpus):
    (last,) = said(Search(corpus=corpus, scores="none"), "<answer>x</answer>", label=None)
    assert last.reward is None
    with pytest.raises(SampleError, match="label is None"):
        said(Search(corpus=corpus), label=None)


def test_it_keeps_the_promises_of_environments(corpus):
    answers = [CAPITAL, "Hm.", "It is <answer>2</answer>"]
    check_environment(lambda: Search(corpus=corpus), answers=answers)


def test_what_is_retrieved_is_masked_and_what_is_sampled_is_trained(corpus):
    """A token a byte: the mask is 1 on the bytes of the turns and 0 on those of the passages between them."""
    turns = [list(CAPITAL.encode()), list(b"<answer>Paris</answer>")]
    given = Sample(index=0, group_index=0, prompt="?", tokens=[63], label="Paris")
    played = asyncio.run(_played(lambda: Search(corpus=corpus, topk=1), given, _Bytes(), turns, None))
    between = "\n\n<information>Doc 1 (Title: Paris): Paris is the capital of France, on the river Seine.</information>\n\n"
    assert played.response == CAPITAL + between + "<answer>Paris</answer>"
    assert played.loss_mask == [1] * len(CAPITAL) + [0] * len(between) + [1] * 22
    assert (played.reward, played.metadata["multi_turn"]["turns"]) == (1.0, 2)


@pytest.fixture
def server():
    """A server of Search-R1's protocol; `replies` is what it says next, `asked` what it was posted."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.server.asked.append(json.loads(body))
            status, reply = self.server.replies.pop(0)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(reply).encode())

        def log_message(self, *_):
            """Say nothing."""

    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.asked, made.replies = [], []
    made.url = f"http://127.0.0.1:{made.server_port}/retrieve"
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def remote(server, **given):
    return Search(url=server.url, request={"tries": 2, "first_wait_s": 0.0}, **given)


def test_a_server_is_asked_as_search_r1s_is(server):
    rows = [{"document": {"id": "7", "contents": '"Paris"\nA city.'}, "score": 2.5}, {"contents": "Bread."}]
    server.replies += [(503, {}), (200, {"result": [rows]})]
    (found,) = said(remote(server, topk=2), "<search>Paris</search>")
    assert server.asked == [{"queries": ["Paris"], "topk": 2, "return_scores": True}] * 2
    assert found.content == "\n\n<information>Doc 1 (Title: Paris): A city.\nDoc 2: Bread.</information>\n\n"


def test_conversations_share_the_client_of_a_server_which_bounds_their_requests_together(server):
    server.replies += [(200, {"result": [[]]})]

    async def main():
        services, sample = {}, Sample(index=0, label="x")
        one, two, other = remote(server), remote(server), Search(url=server.url)
        for each in (one, two, other):
            each.use(services)
            await each.reset(sample)
        clients = [await each._opened() for each in (one, two, other)]
        await one.close()  # which ends for itself alone
        answered = await two.step(sample, "<search>Paris</search>")
        await close_all(list(services.values()))
        return clients, answered.info["found"], [client._client._client.is_closed for client in clients]

    (first, second, asked_otherwise), found, are_closed = asyncio.run(main())
    assert first is second and first is not asked_otherwise
    assert (found, are_closed) == (0, [True] * 3)


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        ((404, {}), "refused with status 404"),
        ((200, {"results": []}), "answered .* wanted"),
        ((200, {"result": []}), "answered .* wanted"),
        ((200, {"result": [[{"document": {"id": 1}}]]}), "wanted text"),
        ((200, [1]), "answered"),
    ],
)
def test_a_server_that_says_something_else_is_an_error_that_names_it(server, reply, told):
    server.replies += [reply]
    with pytest.raises(RewardError, match=told) as failed:
        said(remote(server), "<search>Paris</search>")
    assert server.url in str(failed.value)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", ":2: is not JSON"),
        ("[1]", ":2: is a JSON list; wanted an object"),
        ('{"title": "x"}', r":2: has \['title'\]; wanted text"),
        ('{"text": 3}', r":2: has \['text'\]"),
    ],
)
def test_a_line_that_is_no_passage_is_named(tmp_path, line, told):
    path = tmp_path / "c.jsonl"
    path.write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=told):
        list(read_passages(path))


def test_a_corpus_without_passages_or_words_is_refused(tmp_path):
    for text, told in (("", "holds no passage"), ('{"text": "the"}', "has a word"), (None, "cannot be read")):
        path = tmp_path / f"{text is None}{len(text or '')}.jsonl"
        if text is not None:
            path.write_text(text)
        with pytest.raises(DataError, match=told):
            Bm25Index(path)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "neither"),
        ({"corpus": "a", "url": "http://b"}, "both"),
        ({"corpus": "a", "topk": 0}, "topk 0"),
        ({"url": "nowhere"}, "nowhere"),
    ],
)
def test_options_that_do_not_go_together_are_refused(given, told):
    with pytest.raises(ConfigError, match=told):
        Search(**given)


def test_long_passages_are_cut():
    assert Passage("", "one two\nthree").shown(4, 7) == "Doc 4: one two..."
