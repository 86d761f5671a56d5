"""The report: figures by hand of three trajectories, and of a run of one turn."""

from __future__ import annotations

import json

import pytest
from slime_core.errors import ConfigError, DataError
from slime_kernels.commands import main
from slime_kernels.judge.verdict import EvalStatus, Timing, Verdict
from slime_kernels.problems.generated import generated_problems
from slime_kernels.problems.problem import PROBLEM_KEY
from slime_kernels.report.command import report
from slime_kernels.report.figures import by_level, by_steps, by_turn, figures_of
from slime_kernels.report.outcomes import read_outcomes
from slime_kernels.turns.history import KernelAttempt
from slime_kernels.turns.record import TURNS_KEY

PROBLEM = generated_problems(1, families=["elementwise"])[0][0]


def attempt(turn, reward):
    """A reward of 0.3 and more is that of a correct kernel, 0.7 more than it its speedup."""
    correct, speedup = reward >= 0.3, reward + 0.7
    timing = Timing(source="cost-model", target="sm_90", runtime_us=1.0, baseline_us=speedup, speedup=speedup)
    verdict = Verdict(
        status=EvalStatus.CORRECT if correct else EvalStatus.INCORRECT,
        gate="fast",
        compiled=reward > 0,
        correct=correct,
        timing=timing if correct else None,
        reward=reward,
    )
    return KernelAttempt(turn=turn, code="x", verdict=verdict).to_dict()


def row(index, rewards, *, score, level=1, ended="max_turns", rollout_id=None):
    record = {"history": [attempt(turn, one) for turn, one in enumerate(rewards)], "ended_by": ended}
    metadata = {PROBLEM_KEY: {**PROBLEM.to_dict(), "level": level}, TURNS_KEY: record}
    reward = {"score": score, "compiled": 1.0, "correct": 1.0, "speedup": 1.0, "turns": float(len(rewards))}
    return {
        "index": index,
        "group_index": 0,
        "rollout_id": rollout_id,
        "metadata": metadata,
        "reward": reward,
    }


@pytest.fixture
def run(tmp_path):
    """Step 1: one that never compiles and one that gets there in the third turn; step 2: one that is fast at once, of level 2."""
    first = [row(0, [0.0, 0.0], score=0.0, ended="all_failed"), row(1, [0.0, 0.1, 0.3], score=0.088)]
    second = [row(2, [1.5], score=1.5, level=2, ended="fast_enough")]
    folder = tmp_path / "rollouts"
    folder.mkdir()
    for name, rows in (("step_000001", first), ("step_000002", second), ("eval_step_000002", second)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    (folder / "dropped_step_000001.jsonl").write_text(json.dumps(row(3, [0.1], score=0.1)) + "\n")
    return tmp_path


def trained(run):
    return [one for one in read_outcomes(run) if not one.evaluation]


def test_figures_of_a_run_by_hand(run):
    found = figures_of(trained(run))
    # the best turns: nothing; 0.3 at a speedup of 1.0; 1.5 at 2.2
    assert (found.n, found.compiled, found.correct) == (3, pytest.approx(2 / 3), pytest.approx(2 / 3))
    assert found.fast == {1.0: pytest.approx(1 / 3), 1.5: pytest.approx(1 / 3), 2.0: pytest.approx(1 / 3)}
    assert found.speedup == pytest.approx((1.0 * 2.2) ** 0.5)
    assert (found.turns, found.value) == (2.0, pytest.approx((0.0 + 0.088 + 1.5) / 3))


def test_figures_of_steps_and_levels_by_hand(run):
    assert {name: one.correct for name, one in by_steps(trained(run)).items()} == {"1": 0.5, "2": 1.0}
    assert {name: one.n for name, one in by_steps(trained(run), most=1).items()} == {"1-2": 3}
    assert {level: one.correct for level, one in by_level(trained(run)).items()} == {1: 0.5, 2: 1.0}


def test_figures_of_turns_by_hand(run):
    # turn 0: 0.0, 0.0, 1.5; turn 1: 0.0 after 0.0, 0.1 after 0.0; turn 2: 0.3 after 0.1
    first, second, third = by_turn(trained(run))
    assert (first.n, first.correct, first.improved) == (3, pytest.approx(1 / 3), None)
    assert (second.n, second.compiled, second.correct, second.improved) == (2, 0.5, 0.0, 0.5)
    assert (third.n, third.correct, third.reward, third.improved) == (1, 1.0, 0.3, 1.0)


def test_samples_of_one_trajectory_count_once(tmp_path):
    (tmp_path / "rollouts").mkdir()
    rows = [row(index, [0.1, 0.3], score=score, rollout_id=7) for index, score in ((7, 0.22), (8, 0.3))]
    text = "".join(json.dumps(one) + "\n" for one in rows)
    (tmp_path / "rollouts" / "step_000001.jsonl").write_text(text)
    (found,) = read_outcomes(tmp_path)
    assert found.value == 0.22


def test_a_run_of_one_turn_is_told_from_its_rewards(tmp_path):
    (tmp_path / "rollouts").mkdir()
    one = row(0, [0.3], score=0.8)
    del one["metadata"][TURNS_KEY]
    one["reward"] = {"score": 0.8, "compiled": 1.0, "correct": 1.0, "speedup": 1.5, "details": {}}
    (tmp_path / "rollouts" / "step_000001.jsonl").write_text(json.dumps(one) + "\n")
    (found,) = read_outcomes(tmp_path)
    assert (found.best.correct, found.best.speedup, found.value, found.ended_by) == (True, 1.5, 0.8, None)


def test_the_report_has_a_table_of_each_kind_and_a_picture(run, capsys):
    assert main(["report", str(run)]) == 0
    said = capsys.readouterr().out
    for title in ("training, by step", "training, by level", "training, by turn", "evaluation, by step"):
        assert title in said
    assert "ended by: all_failed 1, max_turns 1, fast_enough 1" in said
    assert (run / "kernels.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_no_run_of_kernels_is_refused(tmp_path, capsys):
    with pytest.raises(ConfigError, match="wanted the folder of a run"):
        report(tmp_path, None)
    (tmp_path / "rollouts").mkdir()
    with pytest.raises(DataError, match="no sample of a kernel problem"):
        report(tmp_path, None)
    assert main(["report", str(tmp_path)]) == 2
    assert "no sample of a kernel problem" in capsys.readouterr().err
