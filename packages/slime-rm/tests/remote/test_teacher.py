"""The sample hook `teacher` against a real server that answers as SGLang does, or talks nonsense."""

import asyncio
import json
import types

import pytest
from slime_core.errors import ConfigError, RewardError, SampleError
from slime_core.samples import Sample
from slime_rm.remote.teacher import ServedTeacher, TeacherSettings

pytestmark = pytest.mark.timeout(60)


def settings_at(temperature, folder):
    """What the hook reads of a run's settings."""
    rollout = types.SimpleNamespace(rollout_temperature=temperature)
    run = types.SimpleNamespace(output_dir=str(folder), run_name="run")
    return types.SimpleNamespace(rollout=rollout, run=run)


def taught(server, sample, folder, *, temperature=1.0, evaluation=False, **options):
    """Call the hook on a sample; returns it."""
    given = TeacherSettings(**{"opd_teacher_url": server.url, "first_wait_s": 0.01, "tries": 2} | options)

    async def main():
        hook = ServedTeacher(settings=given)
        try:
            return await hook(settings_at(temperature, folder), sample, rollout_id=0, evaluation=evaluation)
        finally:
            await hook.close()

    return asyncio.run(main())


def minus_id(number, path, body):
    """SGLang's answer of a model under which token t has log-prob -t; the first token that is asked for has none."""
    ids = body["input_ids"][body["logprob_start_len"] :]
    entries = [[None if i == 0 else -float(t), t, None] for i, t in enumerate(ids)]
    return 200, json.dumps({"text": "", "meta_info": {"input_token_logprobs": entries}})


def a_sample(tokens=(5, 6, 7, 8), n=2):
    sample = Sample(index=3, prompt="x", tokens=list(tokens[: len(tokens) - n]))
    sample.append_response(list(tokens[len(tokens) - n :]), text="y", log_probs=[-1.0] * n)
    return sample


def test_response_tokens_get_the_teachers_log_probs_and_nothing_is_generated(server, tmp_path):
    server.answer = minus_id
    sample = taught(server, a_sample(), tmp_path)
    assert list(sample.teacher_log_probs) == [-7.0, -8.0]
    sample.check(vocab_size=100)
    [(path, body, _)] = server.requests
    assert path == "/generate"
    assert body == {
        "input_ids": [5, 6, 7, 8],
        "sampling_params": {"temperature": 0, "max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": 1,
    }


def test_the_reference_systems_address_with_its_path_is_taken_too(server, tmp_path):
    server.answer = minus_id
    taught(server, a_sample(), tmp_path, opd_teacher_url=f"{server.url}/generate")
    assert server.requests[0][0] == "/generate"


def test_an_empty_response_and_an_evaluation_ask_nobody(server, tmp_path):
    empty = a_sample((5, 6), n=0)
    assert taught(server, empty, tmp_path).teacher_log_probs == []
    assert taught(server, a_sample(), tmp_path, evaluation=True).teacher_log_probs is None
    assert server.requests == []


def test_a_server_that_stumbles_is_asked_again(server, tmp_path):
    server.answer = lambda number, path, body: (503, "") if number == 1 else minus_id(number, path, body)
    assert list(taught(server, a_sample(), tmp_path).teacher_log_probs) == [-7.0, -8.0]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([[None, 6], [-1.0, 7], [-1.0, 9]], "log-probs of other tokens"),
        ([[None, 6], [-1.0, 8]], "wanted meta_info"),
        ([[-1.0, 8]], "log-probs of other tokens"),
        ([[None, 6], [float("nan"), 7], [-1.0, 8]], "or none of some"),
        (None, "wanted meta_info.input_token_logprobs"),
    ],
)
def test_an_answer_that_is_not_these_tokens_log_probs_is_an_error(server, tmp_path, entries, message):
    server.answer = lambda *_: (200, json.dumps({"meta_info": {"input_token_logprobs": entries}}))
    with pytest.raises(RewardError, match=message):
        taught(server, a_sample(), tmp_path)


def test_what_it_cannot_do_is_said(server, tmp_path):
    with pytest.raises(ConfigError, match="--opd-teacher-url"):
        ServedTeacher(settings=TeacherSettings())
    with pytest.raises(ConfigError, match="rollout_temperature"):
        taught(server, a_sample(), tmp_path, temperature=0.7)
    pictured = a_sample()
    pictured.multimodal_inputs = {"images": ["x"]}
    with pytest.raises(SampleError, match="has images"):
        taught(server, pictured, tmp_path)
    assert server.requests == []
