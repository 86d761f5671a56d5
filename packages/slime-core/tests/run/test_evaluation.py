"""What an evaluation makes of its groups: samples whose reward failed, and sets with weights; worked out by hand."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
from slime_core.config.sections import EvalSection, RewardSection, RolloutSection
from slime_core.config.settings import Settings
from slime_core.errors import RewardError
from slime_core.rollout.group import fail
from slime_core.rollout.user_hooks import RolloutHooks
from slime_core.run import evaluation
from slime_core.run.evaluation import evaluate_groups
from slime_core.samples import Sample, Status


def group(index, *rewards):
    samples = []
    for reward in rewards:
        sample = Sample(index=index, tokens=[0, 1], response_length=1, reward=reward, status=Status.COMPLETED)
        if reward is None:
            fail(sample, f"sample {index}: the judge is down")
        samples.append(sample)
    return samples


@pytest.fixture
def evaluated(registry_of):
    """Return the metrics and the accuracy of sets of groups."""

    def evaluated(by_name, *, eval_config=None):
        sections = {"eval": EvalSection(eval_config=eval_config), "reward": RewardSection()}
        run = SimpleNamespace(
            settings=Settings(sections, {}, {}), registry=registry_of(), user_hooks=RolloutHooks()
        )

        async def function(run, step, source):
            return by_name

        written = []
        evaluation = evaluate_groups(run, None, step=3, start={}, write=written.extend, function=function)
        metrics, accuracy = asyncio.run(evaluation)
        assert len(written) == sum(map(len, by_name.values()))  # failed ones, too
        return metrics, accuracy

    return evaluated


def test_a_prompt_of_which_a_sample_failed_is_left_out_and_counted(evaluated):
    by_name = {
        "sums": [group(0, 1.0, 0.0), group(1, 1.0, None), group(2, 1.0, 1.0)],
        "words": [group(3, 0.0)],
    }
    metrics, accuracy = evaluated(by_name)
    assert metrics["eval/sums"] == 0.75
    assert metrics["eval/sums-pass@2"] == 1.0
    assert metrics["eval/sums/reward_errors"] == 1.0
    assert "eval/words/reward_errors" not in metrics
    assert accuracy == 3 / 5


def test_a_failure_is_raised_where_nothing_of_a_set_is_left(evaluated):
    with pytest.raises(RewardError, match=r"sample 1 \(evaluation\): sample 1: the judge is down"):
        evaluated({"sums": [group(0, 1.0)], "words": [group(1, None)]})


@pytest.mark.parametrize(
    ("weights", "accuracy"),
    [((None, None), 1 / 4), ((1.0, 1.0), 1 / 2), ((1.0, None), 1 / 2), ((3.0, None), 3 / 4)],
)
def test_sets_that_were_given_weights_count_by_them_and_others_by_their_samples(
    evaluated, tmp_path, weights, accuracy
):
    """Of `short` its one sample is solved, of `long` none of three."""
    file = tmp_path / "sets.toml"
    file.write_text(
        "".join(
            f'[[eval.datasets]]\nname = "{name}"\npath = "-"\n' + (f"weight = {weight}\n" if weight else "")
            for name, weight in zip(("short", "long"), weights, strict=True)
        )
    )
    by_name = {"short": [group(0, 1.0)], "long": [group(1, 0.0), group(2, 0.0), group(3, 0.0)]}
    assert evaluated(by_name, eval_config=str(file))[1] == pytest.approx(accuracy)


@pytest.mark.parametrize(("common", "long"), [(7, 7), (None, None)])
def test_prompt_and_response_are_bounded_by_the_set_else_by_the_section(
    monkeypatch, registry_of, tmp_path, common, long
):
    """The set `short` has 5 tokens for both: its prompt of 1 leaves 4 to the response, in one turn or several."""
    file = tmp_path / "sets.toml"
    text = '[[eval.datasets]]\nname = "short"\npath = "-"\nmax_context_len = 5\n'
    file.write_text(text + '[[eval.datasets]]\nname = "long"\npath = "-"\n')
    sections = {
        "eval": EvalSection(eval_config=str(file), eval_max_context_len=common),
        "rollout": RolloutSection(
            rollout_batch_size=1, rollout_max_response_len=100, rollout_max_context_len=3
        ),
    }
    groups = [
        [Sample(index=i, tokens=[1], metadata={"source_name": name})]
        for i, name in enumerate(("short", "long"))
    ]
    seen = {}

    async def run_group(run, group, *, params_of, engine, evaluation, max_context_len):
        assert evaluation
        seen[group[0].metadata["source_name"]] = (max_context_len, params_of(group[0]).max_new_tokens)
        return group

    monkeypatch.setattr(evaluation, "run_group", run_group)
    run = SimpleNamespace(
        settings=Settings(sections, {}, {}),
        registry=registry_of(),
        report=lambda *progress: None,
        engine=None,
        concurrency=None,
    )

    class Source:
        def __len__(self):
            return len(groups)

        def take(self, n):
            return groups[:n]

    asyncio.run(evaluation.evaluate(run, 0, Source()))
    assert seen == {"short": (5, 4), "long": (long, 100 if long is None else 6)}
