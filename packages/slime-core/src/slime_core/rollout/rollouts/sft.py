"""The rollout `sft`: nothing is generated; samples are made of the data's own answers (supervised fine-tuning)."""

from __future__ import annotations

import dataclasses

from slime_core.config.sections import RolloutSection
from slime_core.errors import ConfigError, DataError, Problem
from slime_core.protocols import Tokenizer
from slime_core.rollout.chat_masks import Conversation, LossMask
from slime_core.rollout.context import RolloutRun
from slime_core.samples import Group, Sample, Status


async def sft(run: RolloutRun, step: int) -> list[Group]:
    """Take `rollout_batch_size` conversations, and mask all but the assistant's turns (see `conversations`).

    A prompt that is text instead of messages is answered by its label. A sequence beyond `rollout_max_context_len`
    is cut there. A conversation that needs several texts becomes several samples of one execution, which the loss
    counts once.

    Raises:
        DataError: names the sample that has nothing to train on, where it stands in the data, and why.
        ConfigError: names the settings that cannot be meant.
    """
    data, rollout = run.settings.data, run.settings.rollout
    if problems := misfits(rollout):
        raise ConfigError(problems)
    loss_mask: LossMask = run.registry.resolve("slime.loss_masks", data.loss_mask_type)
    return [
        supervised(
            group[0],
            run.tokenizer,
            loss_mask=loss_mask,
            template_kwargs=data.apply_chat_template_kwargs,
            max_tokens=rollout.rollout_max_context_len,
            where=run.where(group[0]),
        )
        for group in run.take(run.sizes.rollout_batch_size)
    ]


def misfits(rollout: RolloutSection) -> list[Problem]:
    """Return settings that have no meaning without generation."""
    problems = []
    if rollout.n_samples_per_prompt != 1:
        wanted = "1: the rollout sft trains on each conversation once a pass"
        problems.append(Problem("rollout.n_samples_per_prompt", str(rollout.n_samples_per_prompt), wanted))
    if rollout.rollout_temperature != 1.0:
        wanted = "1: the trainer divides its logits by it, and nobody sampled the answers of the rollout sft"
        problems.append(Problem("rollout.rollout_temperature", f"{rollout.rollout_temperature:g}", wanted))
    return problems


def supervised(
    sample: Sample,
    tokenizer: Tokenizer,
    *,
    loss_mask: LossMask,
    template_kwargs: dict[str, object] | None = None,
    max_tokens: int | None = None,
    where: str | None = None,
) -> list[Sample]:
    """Turn a pending sample, which holds a conversation, into finished samples.

    Args:
        sample: its `prompt` is chat messages, or text with a `label`; tools are in `metadata["tools"]`.
        tokenizer: renders and encodes.
        loss_mask: from the group `slime.loss_masks`.
        template_kwargs: of the chat template, before the sample's own.
        max_tokens: most tokens of a sequence.
        where: how messages call the sample; its name when not given.

    Raises:
        DataError: there is nothing to train on; names the sample.
    """
    try:
        if isinstance(sample.prompt, str):
            sequences = [_answered(sample, tokenizer)]
        else:
            texts = loss_mask(_conversation(sample, tokenizer, template_kwargs))
            sequences = [text.encode(tokenizer) for text in texts]
        return [_finished(sample, ids, mask, tokenizer, max_tokens) for ids, mask in sequences]
    except DataError as error:
        raise DataError(f"{where or sample.name}: {error}") from error


def why_untrainable(
    sample: Sample,
    tokenizer: Tokenizer,
    *,
    loss_mask: LossMask,
    template_kwargs: dict[str, object] | None = None,
    max_tokens: int | None = None,
) -> str | None:
    """Return why `supervised`, with the same arguments, finds nothing to train on; None where it finds something.

    It is to be quick: conversations are rendered, and only what comes before a first answer is encoded, where `max_tokens` bounds it.
    """
    try:
        if isinstance(sample.prompt, str):
            _, mask = _answered(sample, tokenizer)
            _begin(mask, max_tokens)
            return None
        for text in loss_mask(_conversation(sample, tokenizer, template_kwargs)):
            if max_tokens is not None and text.spans:
                before = tokenizer.encode(text.text[: text.spans[0][0]])
                _begin([0] * len(before) + [1], max_tokens)
    except DataError as error:
        return str(error)
    return None


def _conversation(
    sample: Sample, tokenizer: Tokenizer, template_kwargs: dict[str, object] | None
) -> Conversation:
    assert not isinstance(sample.prompt, str)
    return Conversation(
        messages=sample.prompt,
        tokenizer=tokenizer,
        tools=sample.metadata.get("tools"),
        template_kwargs={**(template_kwargs or {}), **sample.apply_chat_template_kwargs},
    )


def _answered(sample: Sample, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    if sample.label is None:
        raise DataError("the prompt is text and has no label; wanted chat messages, or a label (--label-key)")
    answer = tokenizer.encode(sample.label)
    if tokenizer.eos_token_id is not None:
        answer.append(tokenizer.eos_token_id)
    return [*sample.tokens, *answer], [0] * len(sample.tokens) + [1] * len(answer)


def _finished(
    sample: Sample, ids: list[int], mask: list[int], tokenizer: Tokenizer, max_tokens: int | None
) -> Sample:
    kept, n_prompt = mask[:max_tokens], _begin(mask, max_tokens)
    response = ids[n_prompt : len(kept)]
    return dataclasses.replace(
        sample,
        rollout_id=sample.index,
        tokens=ids[: len(kept)],
        response=tokenizer.decode(response, skip_special_tokens=False),
        response_length=len(response),
        loss_mask=kept[n_prompt:],
        reward=0.0,
        status=Status.COMPLETED if len(kept) == len(ids) else Status.TRUNCATED,
    )


def _begin(mask: list[int], max_tokens: int | None) -> int:
    """Return where the first answer begins; raises DataError where none does among the first `max_tokens` and after the first."""
    kept = mask[:max_tokens]
    if 1 not in kept or kept[0] == 1:
        raise DataError(
            f"no answer begins within {len(kept)} tokens and after the first; raise --rollout-max-context-len, or drop the "
            "conversation"
        )
    return kept.index(1)
