"""Rows of a large file that nobody looked at before the run: what becomes of them when their turn comes."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from slime_core.errors import DataError
from slime_core.rundir.records import read_records
from slime_core.rundir.rundir import RunDir

from .test_loop import prompts, rows, train

#: Rows of the file; the first 10,000 are looked at.
N = 20_000
#: The shuffled order of the rows, as the data source draws it with its seed of 42; `ROW` (from 0) is the first in it, after the first
#: step of four prompts, that is not among the rows looked at. It stands at place `AT`.
DRAWS = random.Random(42)
KEYS = [DRAWS.random() for _ in range(N)]
ORDER = sorted(range(N), key=KEYS.__getitem__)
AT = next(place for place in range(4, N) if ORDER[place] >= 10_000)
ROW = ORDER[AT]
#: The step that it is in.
STEP = AT // 4 + 1


def write(file: Path, usual: object, other: object) -> None:
    """Write the file: every row is the usual one but for `ROW`."""
    lines = [json.dumps(usual) + "\n"] * N
    lines[ROW] = json.dumps(other) + "\n"
    file.write_text("".join(lines))


@pytest.mark.parametrize("loop", ["sync", "one-step-off", "fully-async"])
def test_a_prompt_that_leaves_no_room_drops_its_group_and_ends_no_run(letters, tmp_path, caplog, loop):
    """A prompt of five letters, where prompt and response may have three tokens."""
    write(tmp_path / "letters.jsonl", {"input": "a", "label": "x"}, {"input": "abcde", "label": "x"})
    flags = ("--rollout-max-context-len", "3", "--eval-interval", "none", "--lr", "1.0", "--loop", loop)
    assert train(letters, *flags, "--num-rollout", str(STEP + 1))["status"] == "completed"
    run = RunDir(tmp_path / "runs/letters")
    dropped = [row for step in run.rollout_files("dropped_") for row in read_records(run.dropped_file(step))]
    index = AT * 16  # of its first sample
    assert [(row["index"], row["dropped"]) for row in dropped] == [
        (index + i, "reward_error") for i in range(16)
    ]
    assert dropped[0]["failure"] == (
        f"sample {index} ({tmp_path}/letters.jsonl:{ROW + 1}): its prompt of 5 tokens leaves no room in "
        "rollout_max_context_len, 3; drop such prompts (--rollout-max-prompt-len), or raise it"
    )
    assert f"{dropped[0]['failure']}; its group is dropped" in caplog.text
    groups = {group for group, _ in prompts(run.path)}
    assert AT not in groups and len(groups) == 4 * (STEP + 1)


def test_a_conversation_without_an_answer_is_named_by_its_row_and_mended_in_its_place(letters, tmp_path):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]
    file, run = tmp_path / "letters.jsonl", tmp_path / "runs/letters"
    write(file, {"input": messages}, {"input": messages[:1]})
    flags = (
        "--rollout-function-path",
        "sft",
        "--rollout-engine",
        "none",
        "--n-samples-per-prompt",
        "1",
        "--label-key",
        "none",
    )
    flags += ("--eval-interval", "none", "--save-interval", "1", "--num-rollout", str(STEP + 1))  # fmt: skip
    with pytest.raises(DataError) as raised:
        train(letters, *flags)
    assert str(raised.value).startswith(
        f"sample {AT} ({file}:{ROW + 1}): the conversation has no assistant's message to train on"
    )
    assert [row["step"] for row in rows(run)] == [*range(1, STEP)]
    write(file, {"input": messages}, {"input": messages})
    train(letters, *flags)
    assert [index for _, index in prompts(run)] == [*range(4 * (STEP + 1))]


def test_a_limit_on_prompts_may_be_given_and_changed_while_a_run_goes_on(letters, tmp_path):
    """Of ten rows, four a step, the sixth has three letters: it is trained on in the second step, and later passed over."""
    texts = [*"abcde", "abc", *"ghij"]
    (tmp_path / "letters.jsonl").write_text("".join(json.dumps({"input": text}) + "\n" for text in texts))
    flags = ("--label-key", "none", "--eval-interval", "none", "--save-interval", "2", "--no-rollout-shuffle")
    for n_steps, limit in ((2, "none"), (4, "2"), (6, "1"), (8, "3")):
        train(letters, *flags, "--num-rollout", str(n_steps), "--rollout-max-prompt-len", limit)
    run = RunDir(tmp_path / "runs/letters")
    taken = [
        row["prompt"]
        for step in run.rollout_files()
        for row in list(read_records(run.rollout_file(step)))[::16]
    ]
    short = [text for text in texts if text != "abc"]
    # rows 0 to 7 in two steps; then 8 and 9, and 14 of the next epochs without the long one, of which there are nine each
    after = [*"ij", *short, *short[:5]]
    assert taken[:24] == [*texts[:8], *after]
    # the third epoch was left after five rows, the sixth of which is the long one: it is not too long any more
    assert taken[24:] == ["abc", *"ghij", *"abc"]
