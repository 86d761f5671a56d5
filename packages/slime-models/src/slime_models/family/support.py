"""What slime does with the models of each family: what a family declares, and what the tests of this repository prove."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files

from slime_models.family.family import ModelFamily

#: Feature -> what has been shown where the table says yes. Features that are kinds of parallelism have Megatron's names.
FEATURES: Mapping[str, str] = {
    "train": "logits and gradients of the trainer equal transformers' to 1e-5 in float32, packed and with shared tokens too",
    "convert": "Hugging Face to Megatron and back, bit for bit",
    "lora": "LoRA adapters beside the layers compute what they compute merged",
    "mtp": "multi-token prediction layers are trained",
    "fp8": "weights quantised in blocks of fp8 are within half a step of the originals, under SGLang's names",
    "torch": "engine `torch`: greedy tokens and log-probs of transformers to 1e-5, after a weight update too",
    "sglang": "engine `sglang`: a real server on a CPU gives the log-probs of transformers to 1e-5, after a weight update too",
    "tensor": "tensor parallelism of 2 equals one process",
    "sequence": "sequence parallelism of 2 equals one process",
    "pipeline": "pipeline parallelism of 2 equals one process",
    "context": "context parallelism of 2 equals one process",
    "expert": "expert parallelism of 2 equals one process",
    "optimizer": "the distributed optimizer of 2 ranks equals one process",
}  # fmt: skip
_ENGINES = ("torch", "sglang")
_PARALLEL = ("tensor", "sequence", "pipeline", "context", "expert")


@dataclass(frozen=True)
class Support:
    """One feature of one family."""

    answer: str
    """`yes`: proven by a test of this repository. `open`: not proven, and no reason against it. `says`: the family, of another
    repository, has no reason against it. `no`: the family has one. `none`: its models have no such thing."""
    why: str | None = None
    """That reason."""


def support_of(family: ModelFamily) -> dict[str, Support]:
    """Return feature -> whether slime has it for models of a family."""
    known = proven().get(family.model_type)
    return {feature: _support(family, feature, known) for feature in FEATURES}


def applies(family: ModelFamily, feature: str) -> bool:
    """Return whether the family has a feature, by what it declares: whether a test has to prove it."""
    return _support(family, feature, None).answer == "says"


@functools.cache
def proven() -> Mapping[str, frozenset[str]]:
    """Return model_type -> the features that tests of this repository prove, as `scripts/generate_docs.py` found them marked."""
    text = (files("slime_models.family") / "support.json").read_text(encoding="utf-8")
    return {family: frozenset(features) for family, features in json.loads(text).items()}


def table(families: Iterable[ModelFamily]) -> tuple[list[Sequence[str]], list[str]]:
    """Return rows of words, one a family after a heading, and notes with the reasons that the rows refer to by number."""
    notes: list[str] = []
    rows: list[Sequence[str]] = [("family", *FEATURES)]
    for family in families:
        words = [family.model_type]
        for support in support_of(family).values():
            word = {"none": ""}.get(support.answer, support.answer)
            if support.why is not None:
                if support.why not in notes:
                    notes.append(support.why)
                word += f" ({notes.index(support.why) + 1})"
            words.append(word)
        rows.append(words)
    return rows, notes


def _support(family: ModelFamily, feature: str, known: frozenset[str] | None) -> Support:
    if feature == "expert" and not any(rule.of_experts for rule in family.rules):
        return Support("none")
    if feature == "mtp" and family.mtp_prefix is None:
        return Support("none")
    missing = {**family.not_parallel, **family.not_served_on_cpu, **family.not_updated, **family.not_served}
    if feature in (*_ENGINES, *_PARALLEL) and feature in missing:
        return Support("no", missing[feature])
    if known is None:
        return Support("says")
    return Support("yes" if feature in known else "open")
