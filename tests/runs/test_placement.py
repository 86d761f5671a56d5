"""When a launcher that has processes of its own is told to begin: after what is cheap to refuse, before what is not."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest
from slime_core.config.build import BuildContext
from slime_core.config.load import load_settings
from slime_core.errors import ConfigError, DataError
from slime_core.launch.local import assemble_and, drive
from slime_core.plugins.registry import Registry
from slime_core.protocols import Place, Trainer
from slime_core.testing.tabular import LetterTokenizer, load_tokenizer

#: Folders whose tokenizer was read.
READ: list[Path] = []


def load_letters(model_path: Path) -> LetterTokenizer:
    READ.append(model_path)
    return load_tokenizer(model_path)


class TellingPlacement:
    """Has everything in this process, and tells what it is asked, with the number of tokenizers that were read by then."""

    def __init__(self) -> None:
        READ.clear()
        self.asked: list[tuple[str, int]] = []

    def begin(self, build: BuildContext) -> None:
        self.asked.append(("begin", len(READ)))

    def places(self, build: BuildContext) -> Mapping[int, Place]:
        self.asked.append(("places", len(READ)))
        return {}

    def host(self, build: BuildContext) -> str:
        return "127.0.0.1"

    def create_trainer(self, build: BuildContext) -> Trainer:
        self.asked.append(("create_trainer", len(READ)))
        factory = build.registry.resolve("slime.trainers", build.settings.train.train_backend)
        trainer: Trainer = factory(build)
        return trainer

    def reward_workers(self, build: BuildContext) -> None:
        return None

    async def close(self) -> None:
        self.asked.append(("close", len(READ)))


def run(letters: Path, *flags: str) -> TellingPlacement:
    placement, registry = TellingPlacement(), Registry()
    settings = load_settings(
        [str(letters)], ["--tokenizer", f"{__name__}:load_letters", *flags], registry=registry
    )
    try:
        asyncio.run(assemble_and(drive, settings, registry, placement=placement))
    except (ConfigError, DataError) as error:
        error.add_note(repr(placement.asked))
        raise
    return placement


def test_it_begins_before_the_tokenizer_is_read_which_is_read_once(letters):
    asked = run(letters, "--num-rollout", "1").asked
    assert asked == [("begin", 0), ("places", 1), ("create_trainer", 1), ("close", 1)]


@pytest.mark.parametrize(
    ("flags", "found"),
    [
        (("--prompt-data", "there-is-no-such-file.jsonl"), "there-is-no-such-file.jsonl"),
        (("--rollout-stop-token-ids", "9999"), "found 9999; wanted ids of the vocabulary"),
    ],
)
def test_nothing_begins_where_settings_are_refused(letters, tmp_path, flags, found):
    with pytest.raises(ConfigError, match=found) as caught:
        run(letters, *flags)
    (asked,) = caught.value.__notes__
    assert asked in ("[('close', 0)]", "[('close', 1)]")  # ids of the vocabulary are the tokenizer's
    assert not (tmp_path / "runs").exists()


def test_what_was_begun_is_closed_where_the_data_is_refused(letters, tmp_path):
    (tmp_path / "broken.jsonl").write_text('{"input": \n')
    with pytest.raises(DataError, match=r"broken\.jsonl") as caught:
        run(letters, "--prompt-data", str(tmp_path / "broken.jsonl"))
    assert caught.value.__notes__ == ["[('begin', 0), ('places', 1), ('close', 1)]"]
    assert not (tmp_path / "runs").exists()
