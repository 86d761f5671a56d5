"""Functions of a user's own for a whole evaluation, the training data and corrections, in slime's own signatures."""

from __future__ import annotations

import json

import numpy as np
import pytest
from slime_core.errors import SampleError
from slime_core.rundir.records import read_records
from slime_core.testing.tabular import VOCAB

from ..test_loop import rows, train


def test_an_evaluation_of_ones_own_has_its_sets_and_metrics(letters, tmp_path):
    flags = [
        "--eval-function-path",
        "own_functions:evaluate_halves",
        "--num-rollout",
        "2",
        "--eval-interval",
        "1",
    ]
    summary = train(letters, *flags)
    run = tmp_path / "runs/letters"
    evaluated = rows(run)
    assert [row["eval/own"] for row in evaluated] == [0.0, 1.0, 2.0]
    for row in evaluated:
        assert {"eval/first", "eval/rest"} <= row.keys()
        assert "eval/letters" not in row
    files = sorted((run / "rollouts").glob("eval_*.jsonl"))
    assert [len(list(read_records(file))) for file in files] == [10, 10, 10]
    # 5 prompts of the first set and 5 others, a sample each: all of them count once
    assert summary["eval_after"] == pytest.approx(
        (evaluated[2]["eval/first"] + evaluated[2]["eval/rest"]) / 2
    )


def test_an_evaluation_of_no_set_is_refused(letters):
    with pytest.raises(
        SampleError, match=r"--eval-function-path returned \{\}; wanted a dict of groups of Samples"
    ):
        train(letters, "--eval-function-path", "own_functions:evaluate_nothing")


def test_training_data_of_ones_own_are_what_is_trained_on(letters, tmp_path):
    """The first token of each of three, with a reward of 2 or 1: the table moves by what REINFORCE says of these alone."""
    flags = [
        "--custom-convert-samples-to-train-data-path",
        "own_functions:first_tokens",
        "--num-rollout",
        "1",
    ]
    train(letters, *flags, "--rollout-max-response-len", "3", "--lr", "3.0", "--eval-interval", "none")
    run = tmp_path / "runs/letters"
    done = list(read_records(run / "rollouts/step_000001.jsonl"))
    assert len(done) == 64
    assert {one["response_length"] for one in done} >= {3}
    wanted = np.zeros((VOCAB, VOCAB))
    for one in done:
        prompt, first = ord(one["prompt"][-1]) - 97, one["tokens"][-one["response_length"]]
        reward = 2.0 if one["index"] % 2 == 0 else 1.0
        wanted[prompt] += 3.0 / 64 * reward * (np.eye(VOCAB)[first] - 1 / VOCAB)
    np.testing.assert_allclose(np.load(run / "checkpoints/step_000001/trainer/table.npy"), wanted, atol=1e-12)


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("too_short", r"returned loss_masks of 2 entries in row 0, whose response_length is 1"),
        ("unknown_column", r"returned the columns colour; wanted some of tokens, response_lengths, "),
    ],
)
def test_training_data_that_do_not_fit_are_refused_by_name(letters, function, told):
    with pytest.raises(SampleError, match=rf"--custom-convert-samples-to-train-data-path {told}"):
        train(letters, "--custom-convert-samples-to-train-data-path", f"own_functions:{function}")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_correction_of_ones_own_weighs_each_tokens_loss(letters, tiny_llama, tmp_path):
    """Of half as much loss the gradient is half."""
    flags = [
        "--hf-checkpoint", str(tiny_llama), "--tokenizer", "hf", "--rollout-engine", "torch", "--train-backend", "megatron",
        "--no-bf16", "--advantage-estimator", "grpo", "--loss-type", "policy_loss", "--loss-reducer", "sample-mean",
        "--num-rollout", "1", "--rollout-max-response-len", "4", "--rm-type", "random", "--eval-interval", "none",
        "--save-interval", "none", "--no-save-last", "--tracker", "jsonl", "--lr", "0",
    ]  # fmt: skip
    norms = []
    for name, more in (("whole", []), ("half", ["--custom-tis-function-path", "own_functions:halved"])):
        train(letters, *flags, *more, "--run-name", name)
        (row,) = rows(tmp_path / "runs" / name)
        norms.append(row["train/grad_norm"])
    assert json.loads((tmp_path / "runs/half/metrics.jsonl").read_text())["train/half"] == 0.5
    assert norms[0] > 0
    assert norms[1] == pytest.approx(norms[0] / 2, rel=1e-4)
