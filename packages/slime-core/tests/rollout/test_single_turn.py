"""The generator `single-turn`: one response, also one that goes on, and what the sample notes of it."""

import asyncio
import uuid
from collections import Counter

import pytest
from slime_core.errors import EngineError, SampleError
from slime_core.protocols import Completion, EngineCapabilities, GenerateContext, SamplingParams
from slime_core.rollout.execution import Generator
from slime_core.rollout.generators.single_turn import single_turn
from slime_core.rollout.group import _session_id
from slime_core.run.metrics import rollout_metrics
from slime_core.samples import Sample, Status

from ..byte_tokenizer import ByteTokenizer


class ScriptedEngine:
    """Answers with given bytes, and keeps what it was asked."""

    def __init__(self, text, *, finish_reason="stop", **metadata):
        self.answer = Completion(
            tokens=list(text),
            log_probs=[-0.5] * len(text),
            finish_reason=finish_reason,
            weight_version="3",
            metadata=metadata,
        )
        self.asked = []

    capabilities = EngineCapabilities()

    async def generate(self, tokens, params, *, session_id=None):
        self.asked.append((list(tokens), params, session_id))
        return self.answer


def generate(engine, sample, **params):
    context = GenerateContext(engine=engine, tokenizer=ByteTokenizer(), capabilities=engine.capabilities)
    return asyncio.run(single_turn(context, sample, SamplingParams(**{"max_new_tokens": 10, **params})))


def prompt(text="ab", **fields):
    return Sample(index=0, tokens=list(text.encode()), **fields)


def test_a_response_is_appended_token_by_token():
    engine = ScriptedEngine(b"cde", cached_tokens=1)
    sample = generate(engine, prompt(session_id="s"), temperature=0.5)
    assert engine.asked == [([97, 98], SamplingParams(max_new_tokens=10, temperature=0.5), "s")]
    assert (sample.tokens, sample.response_length, sample.response) == (list(b"abcde"), 3, "cde")
    assert sample.rollout_log_probs == [-0.5] * 3
    assert (sample.status, sample.weight_versions) == (Status.COMPLETED, ["3"])
    assert sample.prefix_cache_info == {"cached_tokens": 1, "total_prompt_tokens": 2}


def test_the_engines_routes_go_with_the_sample():
    routes = [[[0]], [[1]], [[0]]]
    assert generate(ScriptedEngine(b"cd", routed_experts=routes), prompt()).rollout_routed_experts is routes


def test_what_the_engine_measures_adds_up_over_the_requests_of_a_sample():
    sample = generate(
        ScriptedEngine(b"cd", finish_reason="abort", timings={"queue_time": 0.25, "e2e_latency": 1.0}),
        prompt(),
    )
    generate(ScriptedEngine(b"e", timings={"queue_time": 0.5, "e2e_latency": 2.0}), sample)
    assert sample.timings == {"queue_time": 0.75, "e2e_latency": 3.0}


def test_an_error_of_generation_names_the_sample():
    async def broken(context, sample, params):
        raise EngineError("no engine is left")

    generator = Generator(name="broken", function=broken, vocab_size=None, max_context_len=None)
    with pytest.raises(EngineError) as caught:
        asyncio.run(generator.execute(None, prompt(), SamplingParams(max_new_tokens=1)))
    assert caught.value.__notes__ == ["sample 0: the generator broken was at work"]


def test_speculation_is_counted_over_requests_and_samples():
    counts = {
        "spec_accept_token_num": 0,
        "spec_draft_token_num": 4,
        "spec_verify_ct": 2,
        "completion_token_num": 3,
    }
    sample = generate(ScriptedEngine(b"cd", finish_reason="abort", spec_info=counts), prompt())
    sample = generate(ScriptedEngine(b"e", spec_info=counts | {"spec_accept_token_num": 3}), sample)
    assert sample.spec_info == {
        "spec_accept_token_num": 3,
        "spec_draft_token_num": 8,
        "spec_verify_ct": 4,
        "completion_token_num": 6,
    }
    other, plain = prompt(reward=1.0, spec_info=counts), prompt(reward=0.0)
    sample.reward = 1.0
    found = rollout_metrics([[sample], [other, plain]], reward_key=None, drops=Counter())
    assert (found["rollout/spec_accept_rate"], found["rollout/spec_accept_length"]) == (3 / 12, 9 / 6)
    assert not any("spec" in name for name in rollout_metrics([[plain]], reward_key=None, drops=Counter()))


@pytest.mark.parametrize(("reason", "status"), [("length", Status.TRUNCATED), ("abort", Status.ABORTED)])
def test_the_finish_reason_sets_the_status(reason, status):
    assert generate(ScriptedEngine(b"c", finish_reason=reason), prompt()).status is status


def test_an_aborted_response_goes_on_within_its_remaining_budget():
    sample = generate(ScriptedEngine(b"cd", finish_reason="abort"), prompt())
    engine = ScriptedEngine(b"e")
    generate(engine, sample, min_new_tokens=3)
    ((tokens, params, _),) = engine.asked
    assert tokens == list(b"abcd")
    assert (params.max_new_tokens, params.min_new_tokens) == (8, 1)
    assert (sample.response, sample.response_length, sample.status) == ("cde", 3, Status.COMPLETED)
    assert sample.weight_versions == ["3", "3"]


@pytest.mark.parametrize(
    ("earlier", "later", "response"),
    [
        (b"x</ans", b"wer>yz", "x</answer>"),
        (b"<", b"/answer>", "</answer>"),
        (b"</answe", b"rr</answe", "</answerr</answe"),
        (b"</answer>", b"y</answer", "</answer>y</answer"),
        ("é".encode() + b"\xc2", b"\xa7yz", "é§"),
    ],
)
def test_a_stop_string_that_two_calls_share_ends_the_response(earlier, later, response):
    sample = generate(ScriptedEngine(earlier, finish_reason="abort"), prompt(), max_new_tokens=40)
    routes = [[[n]] for n in range(2 + len(earlier + later) - 1)]
    drawn_from = (list(range(2 * len(later))), list(range(0, 2 * len(later) + 1, 2)))
    engine = ScriptedEngine(later, finish_reason="length", routed_experts=routes, top_p_tokens=drawn_from)
    generate(engine, sample, max_new_tokens=40, stop=("</answer>", "§"))
    n_tokens = len(response.encode())
    assert (sample.response, sample.response_length) == (response, n_tokens)
    assert sample.rollout_log_probs == [-0.5] * n_tokens
    assert sample.status is (Status.COMPLETED if response.endswith((">", "§")) else Status.TRUNCATED)
    assert sample.rollout_routed_experts == routes[: 2 + n_tokens - 1]
    assert sample.rollout_top_p_token_ids == list(range(2 * (n_tokens - len(earlier))))
    sample.check()


def test_a_stop_string_before_min_new_tokens_does_not_end_the_response():
    sample = generate(ScriptedEngine(b"a", finish_reason="abort"), prompt())
    generate(ScriptedEngine(b"bab"), sample, stop=("ab",), min_new_tokens=3)
    assert sample.response == "abab"


def reopened(sample):
    sample.status = Status.ABORTED
    return sample


def test_each_version_of_the_weights_that_a_call_met_is_the_samples():
    spans = [{"version": "3", "start": 0, "end": 2}, {"version": "4", "start": 2, "end": 4}]
    sample = generate(ScriptedEngine(b"cdef", weight_versions=spans), prompt())
    assert (sample.weight_versions, sample.weight_version_starts) == (["3", "4"], [0, 2])
    generate(ScriptedEngine(b"gh", weight_versions=spans[:1]), reopened(sample), max_new_tokens=20)
    assert (sample.weight_versions, sample.weight_version_starts) == (["3", "4", "3"], [0, 2, 4])


def test_a_version_met_after_the_stop_string_of_two_calls_is_not_the_samples():
    sample = generate(ScriptedEngine(b"a", finish_reason="abort"), prompt())
    spans = [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 2}]
    generate(ScriptedEngine(b"bc", weight_versions=spans), sample, stop=("ab",))
    assert (sample.response, sample.weight_versions) == ("ab", ["3", "3"])
    assert sample.weight_version_starts == [0, 1]


def test_a_character_that_two_calls_share_is_decoded_whole():
    first, second = "é".encode()
    sample = generate(ScriptedEngine(bytes([first]), finish_reason="abort"), prompt())
    assert sample.response == "\N{REPLACEMENT CHARACTER}"
    assert generate(ScriptedEngine(bytes([second])), sample).response == "é"


def test_text_that_its_ids_do_not_spell_is_kept():
    sample = prompt()
    sample.append_response([120], trainable=False, text="<tool result>")
    assert generate(ScriptedEngine(b"c"), sample).response == "<tool result>c"
    assert sample.loss_mask == [0, 1]


def test_without_budget_the_sample_is_truncated_and_the_engine_not_asked():
    sample = generate(ScriptedEngine(b"cd", finish_reason="abort"), prompt())
    engine = ScriptedEngine(b"e")
    assert generate(engine, sample, max_new_tokens=2).status is Status.TRUNCATED
    assert engine.asked == []


@pytest.mark.parametrize(
    ("sample", "words"),
    [
        (prompt(status=Status.COMPLETED), "status is completed; wanted pending or aborted"),
        (Sample(index=0, prompt=[{"role": "user", "content": "hi"}]), "has no prompt ids"),
        (
            prompt(multimodal_inputs={"image": ["a.png"]}),
            r"carries \['image'\], and the engine takes ids only",
        ),
    ],
)
def test_a_sample_that_cannot_be_generated_is_refused(sample, words):
    with pytest.raises(SampleError, match=f"sample 0: {words}"):
        generate(ScriptedEngine(b"c"), sample)


class SeeingEngine(ScriptedEngine):
    """Takes images, and keeps those, too."""

    capabilities = EngineCapabilities(images=True)

    async def generate(self, tokens, params, *, session_id=None, images=()):
        self.seen = images
        return await super().generate(tokens, params, session_id=session_id)


def test_images_go_with_the_ids_also_when_a_response_goes_on():
    sample = generate(SeeingEngine(b"c", finish_reason="abort"), prompt(multimodal_inputs={"image": ["/a"]}))
    engine = SeeingEngine(b"d")
    assert generate(engine, sample).response == "cd"
    assert ([tokens for tokens, *_ in engine.asked], engine.seen) == ([list(b"abc")], ["/a"])


def test_other_media_than_images_are_refused_by_name():
    sample = prompt(multimodal_inputs={"image": ["/a"], "video": ["/b"]})
    with pytest.raises(SampleError, match=r"carries \['image', 'video'\], and the engine takes image only"):
        generate(SeeingEngine(b"c"), sample)


def test_a_session_is_a_uuid_of_seed_and_index():
    for seed, index in ((42, 7), (2**32 - 1, 2**40)):
        assert _session_id(seed, index) == str(uuid.UUID(int=(seed << 64) | index))
