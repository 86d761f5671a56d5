"""Files of users for the trainer: they run unchanged in runs of Megatron's trainer over a tiny random model."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

ASKED: list[list[int]] = []


class Teacher(BaseHTTPRequestHandler):
    """Gives each token the log-prob of minus its place / 10, as an SGLang server does: none for the first."""

    def do_POST(self) -> None:
        """Answer `/generate`."""
        ids = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["input_ids"]
        ASKED.append(ids)
        rows = [[None if place == 0 else -place / 10, token, None] for place, token in enumerate(ids)]
        body = json.dumps({"text": "", "meta_info": {"input_token_logprobs": rows, "completion_tokens": 0}})
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def teacher() -> Iterator[str]:
    """The address of a teacher."""
    ASKED.clear()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Teacher)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/generate"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize("module", ["distillation", "slime.rollout.on_policy_distillation"])
def test_log_probs_of_a_teacher_on_a_server_are_learned_from(with_megatron, teacher, module):
    flags = [
        "--custom-rm-path",
        f"{module}.reward_func",
        "--rm-url",
        teacher,
        "--use-opd",
        "--opd-kl-coef",
        "1.0",
    ]
    flags += ["--custom-reward-post-process-path", f"{module}.post_process_rewards"]
    run = with_megatron(*flags, "--rollout-batch-size", "2", "--n-samples-per-prompt", "2")
    samples = run.samples()
    assert sorted(ASKED) == sorted(sample["tokens"] for sample in samples)
    # By hand: token t of the whole has -t / 10; reverse KL is the mean of ours minus the teacher's, sample by sample.
    expected = []
    for sample in samples:
        begin = len(sample["tokens"]) - sample["response_length"]
        theirs = [-place / 10 for place in range(begin, len(sample["tokens"]))]
        ours = sample["rollout_log_probs"]
        expected.append(sum(a - b for a, b in zip(ours, theirs, strict=True)) / len(theirs))
    row = run.rows[-1]
    assert row["train/opd_reverse_kl"] == pytest.approx(sum(expected) / len(expected), abs=1e-3)
    assert row["rollout/raw_reward"] == 0.0


def test_a_loss_that_asks_for_entropies_without_a_coefficient(with_megatron):
    flags = ["--custom-loss-function-path", "clipped_weights.loss_function", "--eps-clip-high", "5.0"]
    row = with_megatron(*flags).rows[-1]
    assert row["train/is_ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert row["train/own_kl"] == pytest.approx(0.0, abs=1e-4)
    assert 0 < row["train/entropy_loss"] < 3.3  # of 27 letters at most log(27) = 3.296


def test_a_reducer_that_asks_megatron_for_its_ranks(with_megatron):
    row = with_megatron(
        "--custom-pg-loss-reducer-function-path", "constant_divisor.get_pg_loss_reducer"
    ).rows[-1]
    assert "train/loss" in row


def test_a_correction_that_is_configured_by_a_file_of_its_own(with_megatron):
    custom = json.dumps({"mis_level": "geometric", "mis_lower_bound": 0.5, "mis_upper_bound": 2.0})
    flags = ["--use-tis", "--custom-tis-function-path", "mismatch.compute_mis_weights_with_cp"]
    row = with_megatron(*flags, "--compat-custom-config", custom).rows[-1]
    assert row["train/mis_mean_is_weight_before_clip"] == pytest.approx(1.0, abs=1e-3)
    assert row["train/mis_mask_fraction"] == 0.0


def test_a_loss_that_adds_to_the_default_one(with_megatron):
    row = with_megatron("--custom-loss-function-path", "clipped_weights.with_a_bonus").rows[-1]
    assert row["train/loss"] == pytest.approx(row["train/pg_loss"], abs=1e-6)  # as its metrics say
    assert row["train/bonus"] < 0 and row["train/pg_clipfrac"] == 0.0
