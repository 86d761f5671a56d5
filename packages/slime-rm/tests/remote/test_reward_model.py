"""`reward_model` against a real server that answers as SGLang or vLLM do, stumbles, or talks nonsense."""

import asyncio
import json

import pytest
from slime_core.errors import ConfigError, PluginError
from slime_core.rewards.pool import RewardPool
from slime_core.rewards.workers.calling import build_reward
from slime_core.samples import Sample
from slime_rm.remote.reward_model import RewardModel
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from .calls import asked

pytestmark = pytest.mark.timeout(60)
CHAT = (
    "{{ bos_token }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def scores(server, samples, **options):
    """Call the reward without a pool; returns what it returns and raises."""

    given = {"reward_model_url": server.url, "first_wait_s": 0.01, "output": 0} | options
    return asked(RewardModel, given, samples)


def by_length(number, path, body):
    """The score of a text is its length, the other output minus that."""
    if path == "/classify":
        answer = [{"embedding": [len(t), -len(t)], "meta_info": {}} for t in body["text"]]
    else:
        answer = {
            "data": [
                {"index": i, "label": "x", "probs": [len(t), -len(t)]} for i, t in enumerate(body["input"])
            ]
        }
        answer["data"].reverse()
    return 200, json.dumps(answer)


def save_tokenizer(folder, *, puts_bos):
    """Save a tokenizer with a chat template that begins with its first token, which it puts before texts itself or not."""
    words = Tokenizer(WordLevel({"<s>": 0, "a": 1}, unk_token="a"))
    if puts_bos:
        words.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", chat_template=CHAT)
    made.save_pretrained(folder)


@pytest.fixture
def chat_folder(tmp_path):
    save_tokenizer(tmp_path, puts_bos=True)
    return tmp_path


@pytest.mark.parametrize(("api", "path"), [("sglang", "/classify"), ("openai", "/v1/classify")])
@pytest.mark.parametrize(("output", "sign"), [(0, 1), (1, -1)])
def test_each_sample_gets_the_score_of_its_own_text(server, api, path, output, sign):
    server.answer = by_length
    samples = [Sample(prompt="ab", response="x" * i) for i in range(10)]
    assert scores(server, samples, api=api, output=output, batch_size=4) == [
        sign * (2 + i) for i in range(10)
    ]
    assert {asked for asked, _, _ in server.requests} == {path}
    field = "text" if api == "sglang" else "input"
    assert sorted(len(body[field]) for _, body, _ in server.requests) == [2, 4, 4]


def test_one_output_needs_no_choice_and_several_do(server):
    server.answer = lambda number, path, body: (
        200,
        json.dumps([{"embedding": [2.5] * len(body["text"][0])}]),
    )
    assert scores(server, [Sample(response="x")], output=None) == [2.5]
    (error,) = scores(server, [Sample(response="abc")], output=None)
    assert "answered 3 numbers for a text; set output in rm_args" in str(error)


def test_the_model_and_the_key_are_sent(server, tmp_path):
    server.answer = by_length
    (tmp_path / "key").write_text("secret\n")
    scores(server, [Sample(prompt="p")], api="openai", model="skywork", api_key_file=str(tmp_path / "key"))
    _, body, headers = server.requests[0]
    assert body == {"model": "skywork", "input": ["p"]}
    assert headers["Authorization"] == "Bearer secret"


def test_a_conversation_is_put_into_the_models_own_template_once(server, chat_folder):
    server.answer = by_length
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
    samples = [Sample(prompt=messages, response="Ho"), Sample(prompt="Hi", response="Ho")]
    rendered = Sample(prompt="<|user|>Hi", response="Ho", metadata={"chat": messages})
    scores(server, samples, chat_template_from=str(chat_folder))
    ((_, body, _),) = server.requests
    assert body["text"] == ["<system>Be kind.<user>Hi<assistant>Ho", "<user>Hi<assistant>Ho"]
    scores(server, [rendered], chat_template_from=str(chat_folder), messages_key="chat")
    assert server.requests[1][1]["text"] == ["<system>Be kind.<user>Hi<assistant>Ho"]
    assert messages[-1]["role"] == "user"
    (error,) = scores(server, [Sample(prompt="x")], chat_template_from=str(chat_folder), messages_key="chat")
    assert "metadata has no list of messages under 'chat'" in str(error)


def test_the_templates_first_token_stays_where_the_tokenizer_puts_none(server, tmp_path):
    server.answer = by_length
    save_tokenizer(tmp_path, puts_bos=False)
    scores(server, [Sample(prompt="Hi", response="Ho")], chat_template_from=str(tmp_path))
    assert server.requests[0][1]["text"] == ["<s><user>Hi<assistant>Ho"]


def test_a_conversation_without_a_template_is_an_error(server):
    (error,) = scores(server, [Sample(prompt=[{"role": "user", "content": "Hi"}])])
    assert "set chat_template_from" in str(error)
    assert server.requests == []


def test_a_blank_text_is_an_error_that_the_server_never_sees(server):
    server.answer = by_length
    error, score = scores(server, [Sample(prompt=" ", response="\n"), Sample(response="four")])
    assert "there is nothing to score" in str(error)
    assert score == 4
    assert [body["text"] for _, body, _ in server.requests] == [["four"]]


def test_a_server_that_stumbles_is_asked_again_and_one_that_refuses_is_not(server):
    server.answer = lambda number, path, body: (503, "busy") if number < 3 else by_length(number, path, body)
    assert scores(server, [Sample(response="four")]) == [4]
    server.answer = lambda number, path, body: (400, "too long")
    (error,) = scores(server, [Sample(response="long")])
    assert str(error) == f"{server.url}/classify: refused with status 400, 'too long'"
    assert len(server.requests) == 4


def test_a_slow_server_misses_the_deadline_of_the_pool(server):
    server.answer = server.stuck

    async def main():
        options = {"reward_model_url": server.url}
        async with RewardPool(
            "slime_rm.remote.reward_model:RewardModel", options, workers=1, timeout_s=0.2
        ) as pool:
            return await pool.score(Sample(index=7, response="x"))

    failure = asyncio.run(main())
    assert (failure.kind, failure.message.split(":")[0]) == ("deadline", "sample 7")


@pytest.mark.parametrize(
    ("api", "text"),
    [
        ("sglang", "[]"),
        ("sglang", '[{"embedding": []}, {"embedding": []}]'),
        ("sglang", '[{"embedding": [1.0]}]'),
        ("sglang", '[{"embedding": [null]}, {"embedding": [true]}]'),
        ("sglang", '{"error": "no such model"}'),
        ("sglang", "1.0"),
        ("openai", '{"data": [{"index": 0, "probs": [1.0]}]}'),
        ("openai", "[]"),
    ],
)
def test_nonsense_fails_each_sample_of_its_request_and_is_shown(server, api, text):
    server.answer = lambda number, path, body: (200, text)
    errors = scores(server, [Sample(response="a"), Sample(response="b")], api=api)
    assert [
        f"answered {str(json.loads(text))!r} to 2 samples; wanted output 0" in str(e) for e in errors
    ] == [True] * 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reward_model_url": None}, "rm.reward_model_url: found nothing; wanted the address"),
        ({"api": "grpc"}, "options.api: found 'grpc'; wanted 'sglang' or 'openai'"),
        ({"output": -1}, "options.output: found -1; wanted greater than or equal to 0"),
        ({"batch_size": 0}, "options.batch_size: found 0; wanted greater than or equal to 1"),
    ],
)
def test_wrong_options_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        build_reward(RewardModel, {"reward_model_url": "http://localhost:1"} | options)


def test_a_key_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(PluginError, match=r"api_key_file: .*key: cannot be read"):
        build_reward(
            RewardModel, {"reward_model_url": "http://localhost:1", "api_key_file": str(tmp_path / "key")}
        )


def test_a_folder_without_a_chat_template_is_refused(tmp_path):
    words = Tokenizer(WordLevel({"a": 0}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path)
    options = {"reward_model_url": "http://localhost:1"}
    with pytest.raises(PluginError, match="has no chat template"):
        build_reward(RewardModel, options | {"chat_template_from": str(tmp_path)})
    with pytest.raises(PluginError, match=r"chat_template_from: .*none"):
        build_reward(RewardModel, options | {"chat_template_from": str(tmp_path / "none")})


def test_special_tokens_at_the_end_of_a_response_are_left_out(server, chat_folder):
    server.answer = by_length
    sample = Sample(prompt="Hi ", response="Ho<|im_end|>")
    scores(server, [sample])
    scores(server, [sample], chat_template_from=str(chat_folder))
    assert [body["text"] for _, body, _ in server.requests] == [["Hi Ho"], ["<user>Hi <assistant>Ho"]]
