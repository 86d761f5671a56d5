"""Kits of what a run takes its prompts and text from: data sources, buffers and tokenizers."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from slime_core.errors import DataError
from slime_core.protocols import Buffer, DataSource, Tokenizer
from slime_core.samples import Group, Sample, Status
from slime_core.testing.contracts.promises import answering, group_of, require


def check_source(create: Callable[[], DataSource], *, n_samples_per_prompt: int) -> None:
    """Check a data source: fresh groups with ids of their own, in an order that its state, as JSON, brings back.

    Args:
        create: builds it anew, each time alike.
        n_samples_per_prompt: samples that each of its groups is to have.

    Raises:
        ContractError: says which promise is broken.
    """
    with answering("data source", "a source that hands out groups"):
        source, where = create(), f"data source {type(create()).__name__}"
        size = len(source)
        before = source.take(3)
        state = _json(f"{where}: state()", source.state())
        after = source.take(size + 2 if 0 < size < 1000 else 5)
        _check_fresh(where, [*before, *after], 3 + (size + 2 if 0 < size < 1000 else 5), n_samples_per_prompt)
        other = create()
        require(len(other) == size, where, found=f"lengths {size} and {len(other)}", wanted="one length")
        require(other.take(3) == before, where, found="other first groups anew", wanted="a fixed order")
        other = create()
        other.restore(state)
        again = other.take(len(after))
        require(again == after, where, found="other groups after restore(state)", wanted="the same")


def _check_fresh(where: str, groups: Sequence[Group], n_groups: int, n_samples: int) -> None:
    require(len(groups) == n_groups, where, found=f"{len(groups)} groups for {n_groups}", wanted="all")
    sizes = sorted({len(group) for group in groups})
    require(sizes == [n_samples], where, found=f"groups of {sizes} samples", wanted=f"{n_samples} each")
    samples = [sample for group in groups for sample in group]
    odd = next((sample for sample in samples if not _is_fresh(sample)), None)
    require(odd is None, where, found=f"{odd}"[:200], wanted="pending samples without a response or a reward")
    ids = {sample.index for sample in samples}
    unique = len(ids) == len(samples) and None not in ids
    require(unique, where, found=f"{len(ids)} indexes for {len(samples)} samples", wanted="one each")
    own = [{sample.group_index for sample in group} for group in groups]
    unique = all(len(each) == 1 for each in own) and len(set.union(*own)) == len(groups)
    require(unique, where, found=f"the group_index {own[:4]} ...", wanted="one a group, and no two alike")


def _is_fresh(sample: Any) -> bool:
    pending = isinstance(sample, Sample) and sample.status is Status.PENDING
    return pending and sample.response_length == 0 and sample.reward is None


def check_buffer(create: Callable[[], Buffer], groups: Sequence[Group] | None = None) -> None:
    """Check a buffer: what is put can be taken once, no more than asked for, also after its state, as JSON, is restored.

    Args:
        create: builds it, empty.
        groups: at least two to put into it, as a run with its settings has them; of two samples each when not given.

    Raises:
        ContractError: says which promise is broken.
    """
    held = [group_of([1.0, 0.0]) for _ in range(3)] if groups is None else list(groups)
    for number, sample in enumerate(sample for group in held for sample in group):
        sample.index = number
    wanted = sorted(_ids(held))
    with answering("buffer", "one that holds groups"):
        buffer, where = create(), f"buffer {type(create()).__name__}"
        nothing = buffer.take(1)
        require(len(buffer) == 0 and not nothing, where, found=f"{nothing} in a new one", wanted="nothing")
        buffer.put(held[:1])
        buffer.put(held[1:])
        require(len(buffer) == len(held), where, found=f"length {len(buffer)}", wanted=f"{len(held)}")
        state = _json(f"{where}: state()", buffer.state())
        other = create()
        other.restore(state)
        for each, what in ((buffer, "put"), (other, "restored")):
            first = each.take(1)
            require(len(first) == 1, where, found=f"{len(first)} groups for 1 when {what}", wanted="1")
            rest = each.take(len(held) + 5)
            found = sorted(_ids([*first, *rest]))
            same = found == wanted and len(each) == 0
            require(same, where, found=f"the samples {found} when {what}", wanted=f"each once: {wanted}")


def _ids(groups: Sequence[Group]) -> list[int]:
    return [sample.index if sample.index is not None else -1 for group in groups for sample in group]


def check_tokenizer(tokenizer: Tokenizer, texts: Sequence[str] = ("abc", "cab")) -> None:
    """Check a tokenizer: ids that decode to the text that they were made of, no special ones, and rendered messages.

    A tokenizer without a chat template may refuse to render by DataError, as one without images may.

    Raises:
        ContractError: says which promise is broken.
    """
    where = f"tokenizer {type(tokenizer).__name__}"
    eos = tokenizer.eos_token_id
    require(eos is None or isinstance(eos, int), where, found=f"eos_token_id {eos!r}", wanted="an id or None")
    with answering(where, "ids and text"):
        empty = list(tokenizer.encode(""))
        require(not empty, where, found=f"the ids {empty} of an empty text", wanted="no special tokens")
        for text in texts:
            ids = tokenizer.encode(text)
            whole = isinstance(ids, list) and all(type(token) is int and token >= 0 for token in ids)
            require(whole and eos not in ids, where, found=f"{ids!r:.80}", wanted="a list of ids without eos")
            back = tokenizer.decode(ids)
            require(back == text, where, found=f"{back!r} of the ids of {text!r}", wanted="the same text")
    try:
        messages = [{"role": "user", "content": texts[0]}]
        shown = tokenizer.apply_chat_template(messages)
        without = tokenizer.apply_chat_template(messages, add_generation_prompt=False)
    except DataError:
        return
    rendered = isinstance(shown, str) and texts[0] in shown and shown.startswith(without.rstrip())
    wanted = "the messages as text, then the beginning of an answer"
    require(rendered, where, found=f"{shown!r:.200}", wanted=wanted)


def _json(where: str, state: Any) -> Any:
    with answering(where, "JSON values"):
        back = json.loads(json.dumps(state, allow_nan=False))
    require(
        back == state, where, found="a state that JSON changes", wanted="JSON values: lists, and keys of text"
    )
    return back
