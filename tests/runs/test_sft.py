"""Supervised fine-tuning: what of a conversation is trained on, by hand, on a real tokenizer; SFT, then GRPO."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from slime_core.checks.settings import check_stages
from slime_core.config.load import load_settings, load_stages
from slime_core.errors import ConfigError, DataError, EngineError
from slime_core.launch.local import drive
from slime_core.launch.stages import train_stages
from slime_core.plugins.registry import Registry
from slime_core.rollout.chat_masks import Conversation, appended, rendered
from slime_core.rollout.rollouts.sft import supervised
from slime_core.run.assemble import assemble
from slime_core.samples import Sample, Status
from slime_models.hf.tokenizer import load_tokenizer

SYSTEM = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
)

#: Drops the thinking of all answers but the newest, and joins neighbouring tool results in one turn, as Qwen 3 does.
THINKING = """{% for m in messages %}{% if m.role == 'tool' %}\
{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user
{% endif %}<tool>{{ m.content }}</tool>{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}{% else %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}\
{% else %}{{ m.content }}{% endif %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

#: Drops the thinking of every answer, and opens the next one's in the generation prompt, as R1's distillations do.
DISTILLED = """{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] }}\
{% if m.role == 'assistant' %}<|im_end|>{% endif %}{% endfor %}\
{% if add_generation_prompt %}<assistant><think>
{% endif %}"""


@pytest.fixture(scope="module")
def smollm2_tokenizer(smollm2):
    return load_tokenizer(smollm2)


@pytest.fixture
def with_template(smollm2):
    """Return the tokenizer with another chat template."""

    def make(template: str):
        tokenizer = load_tokenizer(smollm2)
        tokenizer.inner.chat_template = template
        return tokenizer

    return make


def chat(*turns, **keys):
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [
        {"role": names[role], "content": content, **keys.get(f"m{i}", {})}
        for i, (role, content) in enumerate(turns)
    ]


def parts(tokenizer, sample):
    """Return the sample's text as [(text, trained), ...], neighbours of one kind joined."""
    mask = [0] * sample.prompt_length + sample.loss_mask
    found: list[tuple[list[int], int]] = []
    for token, trained in zip(sample.tokens, mask, strict=True):
        if not found or found[-1][1] != trained:
            found.append(([], trained))
        found[-1][0].append(token)
    return [(tokenizer.decode(ids, skip_special_tokens=False), trained) for ids, trained in found]


def samples_of(tokenizer, messages, loss_mask=rendered, **sample):
    return supervised(
        Sample(index=7, group_index=3, prompt=messages, **sample), tokenizer, loss_mask=loss_mask
    )


def test_every_answer_is_trained_on_with_its_end_and_nothing_else(smollm2_tokenizer):
    messages = chat(("u", "Hi"), ("a", "Hello!"), ("u", "2+2?"), ("a", "4"))
    (sample,) = samples_of(smollm2_tokenizer, messages)
    assert parts(smollm2_tokenizer, sample) == [
        (SYSTEM + "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", 0),
        ("Hello!<|im_end|>", 1),
        ("\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n", 0),
        ("4<|im_end|>", 1),
    ]
    whole = smollm2_tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    assert sample.tokens == smollm2_tokenizer.encode(whole.removesuffix("\n"))
    assert (sample.status, sample.reward, sample.rollout_id) == (Status.COMPLETED, 0.0, 7)


def test_an_answer_begins_on_the_token_where_generation_begins(smollm2_tokenizer):
    messages = chat(
        ("u", "Hi"), ("a", "\n\nHello")
    )  # joined with the header's line break it would be another token
    (sample,) = samples_of(smollm2_tokenizer, messages)
    prompt = smollm2_tokenizer.encode(smollm2_tokenizer.apply_chat_template(messages[:1]))
    assert sample.tokens[: sample.prompt_length] == prompt


def test_a_step_loss_mask_of_0_makes_an_answer_context(smollm2_tokenizer):
    messages = chat(("u", "Hi"), ("a", "No"), ("u", "Hm"), ("a", "Yes"), m1={"step_loss_mask": 0})
    (sample,) = samples_of(smollm2_tokenizer, messages)
    assert parts(smollm2_tokenizer, sample)[0][0].endswith(
        "assistant\nNo<|im_end|>\n<|im_start|>user\nHm<|im_end|>\n<|im_start|>assistant\n"
    )
    assert parts(smollm2_tokenizer, sample)[1:] == [("Yes<|im_end|>", 1)]


def test_neighbouring_tool_results_keep_the_one_turn_that_the_template_gives_them(with_template):
    tokenizer = with_template(THINKING)
    messages = chat(("u", "q"), ("a", "call"), ("t", "1"), ("t", "2"), ("a", "three"))
    (sample,) = samples_of(tokenizer, messages)
    assert parts(tokenizer, sample) == [
        ("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n", 0),
        ("call<|im_end|>", 1),
        ("\n<|im_start|>user\n<tool>1</tool><tool>2</tool><|im_end|>\n<|im_start|>assistant\n", 0),
        ("three<|im_end|>", 1),
    ]


def test_answers_that_later_turns_change_are_samples_of_one_execution(with_template):
    tokenizer = with_template(THINKING)
    messages = chat(("u", "q"), ("a", "<think>hm</think>A"), ("u", "r"), ("a", "<think>so</think>B"))
    first, second = samples_of(tokenizer, messages)
    assert parts(tokenizer, first) == [
        ("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n", 0),
        ("<think>hm</think>A<|im_end|>", 1),
    ]
    assert parts(tokenizer, second) == [
        (
            "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nA<|im_end|>\n"
            "<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n",
            0,
        ),
        ("<think>so</think>B<|im_end|>", 1),
    ]
    assert first.rollout_id == second.rollout_id == 7


def test_distilled_templates_get_the_answer_as_it_is(with_template):
    tokenizer = with_template(DISTILLED)
    messages = chat(("u", "q"), ("a", "<think>\nhm</think>A"))
    with pytest.raises(DataError, match=r"sample 7: message 1: .*distill_qwen"):
        samples_of(tokenizer, messages)
    (sample,) = samples_of(tokenizer, messages, appended)
    assert parts(tokenizer, sample) == [("<user>q<assistant><think>\n", 0), ("hm</think>A<|im_end|>", 1)]


def test_a_text_prompt_is_answered_by_its_label(smollm2_tokenizer):
    ids = smollm2_tokenizer.encode("2+2=")
    (sample,) = samples_of(smollm2_tokenizer, "2+2=", tokens=ids, label="4")
    assert parts(smollm2_tokenizer, sample) == [("2+2=", 0), ("4<|im_end|>", 1)]
    with pytest.raises(DataError, match="sample 7: the prompt is text and has no label"):
        samples_of(smollm2_tokenizer, "2+2=", tokens=ids)


def test_an_empty_label_that_no_token_ends_is_no_answer():
    class WithoutEnd:
        eos_token_id = None

        def encode(self, text):
            return [ord(one) for one in text]

    sample = Sample(index=7, group_index=3, prompt="x", tokens=[5, 6], label="")
    with pytest.raises(DataError, match="sample 7: no answer begins within 2 tokens"):
        supervised(sample, WithoutEnd(), loss_mask=rendered)


def test_a_sequence_is_cut_at_the_context(smollm2_tokenizer):
    sample = Sample(index=7, group_index=3, prompt="x", tokens=[5, 6], label="a b c d e f g h")
    (whole,) = supervised(sample, smollm2_tokenizer, loss_mask=rendered)
    (cut,) = supervised(sample, smollm2_tokenizer, loss_mask=rendered, max_tokens=4)
    assert (cut.tokens, cut.loss_mask, cut.status) == (whole.tokens[:4], [1, 1], Status.TRUNCATED)
    with pytest.raises(DataError, match="sample 7: no answer begins within 2 tokens"):
        supervised(sample, smollm2_tokenizer, loss_mask=rendered, max_tokens=2)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (chat(("u", "q")), "has no assistant's message to train on"),
        (chat(("a", "x"), ("u", "q")), "begins with the assistant"),
        (chat(("u", "q"), ("a", "x"), m1={"step_loss_mask": "no"}), "message 1: step_loss_mask is 'no'"),
    ],
)
def test_a_conversation_without_anything_to_train_on_is_named(smollm2_tokenizer, messages, message):
    with pytest.raises(DataError, match=f"sample 7: .*{message}"):
        samples_of(smollm2_tokenizer, messages)


def test_every_mask_type_of_the_reference_system_is_installed(smollm2_tokenizer):
    registry = Registry()
    conversation = Conversation(messages=chat(("u", "q"), ("a", "x")), tokenizer=smollm2_tokenizer)
    for name in ("qwen", "qwen3", "qwen3_5", "distill_qwen", "template"):
        (text,) = registry.resolve("slime.loss_masks", name)(conversation)
        ((start, stop),) = text.spans
        assert text.text[start:stop] == "x<|im_end|>"


def run(recipe: Path, *flags: str) -> dict:
    registry = Registry()
    settings = load_settings([str(recipe)], [*flags, "--tracker", "jsonl"], registry=registry)

    async def main():
        return await drive(await assemble(settings, registry))

    return asyncio.run(main())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_sft_without_an_engine_then_grpo_from_its_weights(root, tiny_llama, tmp_path):
    conversations = tmp_path / "chats.jsonl"
    rows = [{"messages": chat(("u", f"Say {a}"), ("a", a), ("u", "Again"), ("a", a))} for a in "abcd"]
    conversations.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [
        "--output-dir", str(tmp_path), "--no-bf16", "--lr-decay-style", "constant", "--hf-checkpoint", str(tiny_llama),
        "--eval-interval", "none", "--save-interval", "none", "--no-save-last", "--tracker", "jsonl", "--set",
        "stage.sft.run.num_rollout=20", "stage.sft.train.lr=1e-2", "stage.sft.data.data_source_path=file",
        f"stage.sft.data.prompt_data={conversations}", "stage.sft.data.input_key=messages",
        "stage.sft.data.apply_chat_template=false", "stage.sft.rollout.rollout_engine=none",
        "stage.sft.rollout.rollout_batch_size=4", "stage.grpo.run.num_rollout=2", "stage.grpo.train.lr=1e-5",
        "stage.grpo.rollout.rollout_batch_size=2", "stage.grpo.rollout.n_samples_per_prompt=4",
    ]  # fmt: skip
    registry = Registry()
    stages = load_stages([str(root / "recipes/sft-then-grpo.toml")], flags, registry=registry)
    assert check_stages(stages, registry) == []
    train_stages(stages, registry)
    supervised_steps, steps = (
        [json.loads(line) for line in (stage.folder / "metrics.jsonl").read_text().splitlines()]
        for stage in stages
    )
    losses = [row["train/loss"] for row in supervised_steps]
    assert losses[0] > 9  # ln 49152 = 10.8: it knows nothing
    assert losses[-1] < losses[0] / 3
    assert len(steps) == 2
    assert all(row["train/train_rollout_logprob_abs_diff"] < 1e-4 for row in steps)
    # it has the habits of its lessons: answers of one of four letters and the end, where a random model rambles
    assert steps[0]["rollout/response_len/mean"] < 4


def test_the_engine_none_refuses_to_generate(letters):
    with pytest.raises(EngineError, match="rollout_engine is none and something wants to generate"):
        run(letters, "--rollout-engine", "none")


def test_a_save_hf_without_a_step_in_its_name_is_refused(letters):
    with pytest.raises(
        ConfigError, match=r"checkpoint.save_hf: found 'out'; wanted a path with \{step\} in it"
    ):
        run(letters, "--save-hf", "out")


def test_save_hf_is_written_with_every_checkpoint(letters, tmp_path):
    run(letters, "--save-hf", str(tmp_path / "hf/{step}-{rollout_id}"), "--num-rollout", "8")
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["4-3", "8-7"]  # ids count from 0
