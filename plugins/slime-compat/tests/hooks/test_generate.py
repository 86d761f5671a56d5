"""Custom generate functions, written as the reference system's documents describe them, in runs of ours."""

from __future__ import annotations

import pytest

GENERATE = "--custom-generate-function-path"


@pytest.mark.parametrize(
    "path", ["tool_generate.generate", "tool_generate:generate", "tool_generate.generate_appending"]
)
def test_tokens_of_a_tool_are_masked_and_weights_are_known(train, path):
    run = train(GENERATE, path)
    samples = run.samples()
    assert len(samples) == 3 * 4 * 4
    for sample in samples:
        begin, end = sample["environment_spans"][0]
        assert end - begin == 1 and len(sample["environment_spans"]) == 1
        assert sample["loss_mask"] == [int(not begin <= i < end) for i in range(sample["response_length"])]
        assert sample["rollout_log_probs"][begin] == 0.0
        assert set(sample["weight_versions"]) == {str(sample["index"] // 16)}
        assert len(sample["tokens"]) == 1 + sample["response_length"]
    assert {row["train/train_rollout_logprob_abs_diff"] < 1e-6 for row in run.rows[0:]} == {True}
