"""A response from the answers of its requests, in every form that SGLang gives them."""

from __future__ import annotations

import base64

import numpy as np
import pytest
from slime_core.errors import EngineError
from slime_core.protocols import SamplingParams
from slime_core.testing.tabular import LetterTokenizer
from slime_sglang.generation.response import PartialResponse
from slime_sglang.generation.routed_experts import RoutedExpertsFormat
from slime_sglang.http.client import ServerFaultError

PARAMS = SamplingParams(max_new_tokens=6, min_new_tokens=5, seed=2**64 + 3)


def answer(n_tokens, *drawn, ids=None, reason=None, version="1", **meta):
    """An answer or event after `n_tokens` tokens; token t has the log-prob -t / 8."""
    return {
        "output_ids": list(drawn if ids is None else ids),
        "meta_info": {
            "finish_reason": None if reason is None else {"type": reason},
            "weight_version": version,
            "completion_tokens": n_tokens,
            "output_token_logprobs": [[-token / 8, token, None] for token in drawn],
            **meta,
        },
    }


def asked(params=PARAMS):
    response = PartialResponse([0, 0], params, tokenizer=LetterTokenizer())
    response.request(stream=True)
    return response


def taken(*answers, params=PARAMS):
    response = asked(params)
    for one in answers:
        response.take(one)
    return response.completion("none")


@pytest.mark.parametrize(
    "events",
    [
        [answer(3, 1, 2, 3, reason="stop")],
        [answer(1, 1), answer(3, 2, 3, reason="stop")],
        [answer(1, 1), answer(3, 1, 2, 3, reason="stop")],
        [answer(0), answer(2, 1, 2), answer(2), answer(3, 3, reason="stop")],
    ],
    ids=["one", "each token once", "all tokens again", "with empty ones"],
)
def test_events_make_the_response_in_every_form(events):
    completion = taken(*events)
    assert (completion.tokens, completion.log_probs) == ([1, 2, 3], [-0.125, -0.25, -0.375])
    assert (completion.finish_reason, completion.weight_version) == ("stop", "1")
    assert completion.metadata["weight_versions"] == [{"version": "1", "start": 0, "end": 3}]


@pytest.mark.parametrize("drawn", [(1, 2), ()])
def test_an_id_that_is_repeated_at_an_abort_counts_once(drawn):
    n = len(drawn)
    completion = taken(answer(n, *drawn), answer(n, *drawn, ids=drawn[-1:], reason="abort"))
    assert (completion.tokens, completion.finish_reason) == (list(drawn), "abort")


def test_counters_of_speculation_add_up_over_requests_each_of_which_counts_anew():
    def spoken(*counts):
        return dict(
            zip(
                ("spec_num_correct_drafts", "spec_num_proposed_drafts", "spec_verify_ct"), counts, strict=True
            )
        )

    response = asked()
    response.take(answer(1, 1))
    response.take(answer(2, 2, **spoken(0, 3, 1)))
    response.take(answer(3, 3, **spoken(0, 6, 2)))  # and its engine is lost
    response.request(stream=True)
    response.take(answer(3, 4, 5, 6, reason="length", **spoken(2, 3, 1)))
    assert response.completion("none").metadata["spec_info"] == {
        "spec_accept_token_num": 2,
        "spec_draft_token_num": 9,
        "spec_verify_ct": 3,
        "completion_token_num": 6,
    }
    assert "spec_info" not in taken(answer(1, 1, reason="stop")).metadata


def test_nothing_arrived_is_an_abort_under_the_version_that_is_given():
    completion = asked().completion("none")
    assert (completion.tokens, completion.finish_reason, completion.weight_version) == ([], "abort", "none")


def test_a_further_request_is_for_what_is_left_and_draws_by_the_same_seed():
    response = asked()
    response.take(answer(2, 1, 2))
    body = response.request(stream=False)
    assert (body["input_ids"], body["stream"]) == ([0, 0, 1, 2], False)
    sampling = body["sampling_params"]
    assert (sampling["max_new_tokens"], sampling["min_new_tokens"], sampling["sampling_seed"]) == (4, 3, 3)


def test_spans_of_versions_are_those_of_the_last_event_behind_those_of_earlier_requests():
    response = asked()
    response.take(answer(1, 1, version="1"))
    response.take(answer(2, 2, version="2"))
    response.request(stream=True)
    response.take(answer(1, 3, version="2"))
    versions = [{"version": "2", "start": 0, "end": 2}, {"version": "3", "start": 2, "end": 3}]
    response.take(answer(3, 4, 5, version="3", reason="stop", weight_versions=versions))
    completion = response.completion("none")
    assert completion.tokens == [1, 2, 3, 4, 5]
    assert completion.metadata["weight_versions"] == [
        {"version": "1", "start": 0, "end": 1},
        {"version": "2", "start": 1, "end": 4},
        {"version": "3", "start": 4, "end": 5},
    ]


def test_all_tokens_without_a_last_event_are_a_response_that_ended_by_its_length():
    response = asked()
    response.take(answer(6, 1, 2, 3, 4, 5, 6))
    assert response.is_over
    assert response.completion("none").finish_reason == "length"


def test_counters_are_of_the_first_request_and_seconds_of_the_last():
    response = asked()
    response.take(answer(1, 1, cached_tokens=2, e2e_latency=9.0))
    response.request(stream=True)
    response.take(answer(1, 2, cached_tokens=3, e2e_latency=0.5, queue_time=None, reason="stop"))
    metadata = response.completion("none").metadata
    assert (metadata["cached_tokens"], metadata["timings"]) == (2, {"e2e_latency": 0.5})


@pytest.mark.parametrize(
    "event",
    [
        answer(4, 2, 3),
        answer(1, 2, 3),
        answer(3, 2, 3, ids=[2]),
        answer(3, 2, 3, ids=[2, 4]),
        answer(3, 2, 3, ids=[1, 2, 3]),
        {"output_ids": [2]},
        {"text": "b"},
        [2],
        None,
        {"error": {"message": "out of memory", "code": 500}},
        {"error": "out of memory"},
        answer(1, finish_reason={"type": "abort", "status_code": 503, "message": "full"}),
    ],
    ids=str,
)
def test_what_does_not_follow_is_the_servers_fault_and_leaves_what_arrived(event):
    response = asked()
    response.take(answer(1, 1))
    with pytest.raises(ServerFaultError):
        response.take(event)
    assert response.completion("none").tokens == [1]
    assert not response.is_over


@pytest.mark.parametrize(
    "event",
    [
        {"error": {"message": "the input is too long", "code": 400}},
        answer(0, finish_reason={"type": "abort", "status_code": 400, "message": "the input is too long"}),
    ],
)
def test_a_refusal_is_no_fault(event):
    with pytest.raises(EngineError, match="the input is too long") as caught:
        asked().take(event)
    assert not isinstance(caught.value, ServerFaultError)


def test_log_probs_that_are_no_numbers_are_an_error():
    event = answer(2, 1, 2)
    event["meta_info"]["output_token_logprobs"][1][0] = None  # as JSON has no NaN
    with pytest.raises(EngineError, match="log-probs came that are no numbers"):
        taken(event)


def routed(params=PARAMS):
    """A response of a model with one layer, of which each token passes two experts."""
    response = PartialResponse([0, 0], params, tokenizer=LetterTokenizer())
    assert response.request(stream=True, experts_format=RoutedExpertsFormat(n_layers=1, topk=2))[
        "return_routed_experts"
    ]
    return response


def encoded(*numbers):
    return base64.b64encode(np.array(numbers, dtype=np.int32).tobytes()).decode()


def test_routes_come_as_token_by_layer_by_place():
    """Three tokens have experts: the last of four predicts nothing."""
    response = routed()
    response.take(answer(2, 1, 2, reason="stop", routed_experts=encoded(3, 0, 1, 2, 0, 1)))
    assert response.completion("none").metadata["routed_experts"].tolist() == [[[3, 0]], [[1, 2]], [[0, 1]]]


@pytest.mark.parametrize(
    ("meta", "message"),
    [
        ({}, "were asked for, and the answer has none"),
        ({"routed_experts": encoded(0, 1, 0, 1)}, "4 experts came; wanted 3 tokens x 1 layers x 2"),
    ],
)
def test_routes_that_are_not_there_or_too_few_are_the_servers_fault(meta, message):
    response = routed()
    with pytest.raises(ServerFaultError, match=message):
        response.take(answer(2, 1, 2, reason="stop", **meta))
    assert not response.is_over
    response.take(answer(2, 1, 2, reason="abort"))
    assert "routed_experts" not in response.completion("none").metadata


def test_routes_that_were_lost_with_all_tokens_there_are_asked_for_with_the_last_token():
    response = routed(SamplingParams(max_new_tokens=2))
    response.take(answer(2, 1, 2))
    assert not response.is_over
    body = response.request(stream=True, experts_format=RoutedExpertsFormat(n_layers=1, topk=2))
    assert (body["input_ids"], body["sampling_params"]["max_new_tokens"]) == ([0, 0, 1], 1)
    response.take(answer(1, 2, reason="length", routed_experts=encoded(3, 0, 1, 2, 0, 1)))
    completion = response.completion("none")
    assert (completion.tokens, len(completion.metadata["routed_experts"])) == ([1, 2], 3)


IMAGE = 9
SEEING = [0, IMAGE, IMAGE, 0, IMAGE, 1]


def drafted(tokens, placeholder=IMAGE):
    response = PartialResponse(tokens, PARAMS, tokenizer=LetterTokenizer(), images=["data:a", "data:b"])
    return response, response.request(stream=True, placeholder=placeholder)


def test_a_run_of_placeholders_is_sent_as_one_and_each_request_has_all_images():
    response, first = drafted(SEEING)
    response.take(answer(2, 2, 3) | {"prompt_token_ids": SEEING})
    second = response.request(stream=True, placeholder=IMAGE)
    assert first["input_ids"] == [0, IMAGE, 0, IMAGE, 1]
    assert second["input_ids"] == [0, IMAGE, 0, IMAGE, 1, 2, 3]
    assert first["image_data"] == second["image_data"] == ["data:a", "data:b"]
    response.take(answer(4, 4, 5, 6, 7, reason="length") | {"prompt_token_ids": [*SEEING, 2, 3]})
    assert response.completion("none").tokens == [2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize(
    "tokens", [[0, IMAGE, IMAGE, 0], [0, IMAGE, 0, IMAGE, 1, IMAGE]], ids=["few", "many"]
)
def test_other_than_one_run_for_each_image_is_refused(tokens):
    with pytest.raises(EngineError, match="runs of the image placeholder 9 among the ids and 2 images"):
        drafted(tokens)


def test_a_model_without_a_placeholder_is_refused():
    with pytest.raises(EngineError, match=r"2 images, and the model's config.json has no image_token_id"):
        drafted(SEEING, placeholder=None)


def test_a_server_that_reads_other_ids_is_refused_and_not_asked_elsewhere():
    response, _ = drafted(SEEING)
    with pytest.raises(
        EngineError, match="read prompt and images as 5 ids, which are not the sample's 6"
    ) as caught:
        response.take(answer(1, 2) | {"prompt_token_ids": SEEING[1:]})
    assert not isinstance(caught.value, ServerFaultError)


def test_a_server_that_does_not_say_what_it_read_is_at_fault_unless_it_read_nothing():
    response, _ = drafted(SEEING)
    with pytest.raises(ServerFaultError, match="the ids of the prompt were asked for"):
        response.take(answer(1, 2))
    response.take(answer(0, reason="abort"))
    assert response.completion("none").finish_reason == "abort"
