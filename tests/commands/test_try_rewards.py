"""Rewards before a run: `slime rm try` and the gold answers of `slime check`; and a row that chooses its reward."""

from __future__ import annotations

import json

import pytest
from slime_core.cli import main
from slime_core.samples import Sample
from slime_rm.text.random_score import random

pytestmark = pytest.mark.timeout(600)


def test_trying_a_reward_prints_the_score_and_why(slime):
    tried = slime("rm", "try", "math", "--response", r"so \boxed{0.5}", "--label", r"\frac12")
    assert tried.returncode == 0, tried.stderr
    assert tried.stdout.splitlines() == ["score: 1.0", "  answer: 0.5", "  why: same meaning"]
    assert tried.stderr == ""


def test_trying_a_reward_reads_metadata_options_and_standard_input(slime):
    constraints = json.dumps({"instruction_id_list": ["punctuation:no_comma"]})
    tried = slime(
        "rm", "try", "ifbench", "--response", "-", "--metadata", constraints, "--json", input="a, b"
    )
    assert json.loads(tried.stdout)["score"] == 0.0
    flexible = json.dumps({"method": "flexible"})
    tried = slime("rm", "try", "gsm8k", "--response", "it is 7", "--label", "7", "--rm-args", flexible)
    assert tried.stdout.startswith("score: 1.0\nacc: 1.0\n")


def test_trying_a_function_of_a_file_in_the_working_directory(slime, tmp_path):
    (tmp_path / "mine.py").write_text("def score(sample):\n    return float(len(sample.response))\n")
    tried = slime("rm", "try", "mine:score", "--response", "four", cwd=tmp_path)
    assert (tried.stdout, tried.stderr) == ("score: 4.0\n", "")
    missed = slime("rm", "try", "mime:score", "--response", "four", cwd=tmp_path)
    assert (
        "No module named 'mime'; wanted module:attribute, of a module that is installed or in"
        in missed.stderr
    )


def test_trying_a_group_reward_scores_each_response_beside_the_others(slime_here):
    responses = [word for answer in ("1/2", "0.5", "3") for word in ("--response", rf"\boxed{{{answer}}}")]
    tried = slime_here("rm", "try", "majority", "--group-rm", *responses, "--json")
    assert tried.returncode == 0, tried.stderr
    assert [entry["score"] for entry in json.loads(tried.stdout)] == [1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("exact", "--response", "x", "--response", "y"),
            "--response: found 2 responses; wanted one; or --group-rm",
        ),
        (("majority", "--response", "x"), "'majority' exists in slime.group_rewards"),
        (("mth", "--response", "x"), "no plugin is named 'mth'; did you mean 'math'?"),
        (
            ("math", "--response", "x"),
            "sample 0: reward slime_rm.math.math:math raised SampleError: label is None, wanted the ground truth",
        ),
        (("math", "--response", "x", "--metadata", "[1"), "--metadata: found '[1', which is not JSON"),
        (("math", "--response", "x", "--metadata", "[1]"), "--metadata: found '[1]'; wanted a JSON object"),
        (("math", "--response", "x", "--timeout-s", "0"), "found 0; wanted more than 0"),
        (("gsm8k", "--response", "x", "--rm-args", '{"methd": 1}'), "did you mean 'method'?"),
        (("math",), "--response"),
        ((), "TYPE"),
    ],
)
def test_bad_input_to_a_trial_is_refused(capsys, words, message):
    try:
        status = main.run(["rm", "try", *words])
    except SystemExit as refused:  # argparse's own
        status = refused.code
    assert status == 2
    assert message in capsys.readouterr().err


def labels(tmp_path, *values):
    rows = [json.dumps({"input": "a", "label": value}) + "\n" for value in values]
    (tmp_path / "letters.jsonl").write_text("".join(rows))


def test_check_accepts_gold_answers_in_the_form_that_the_reward_wants(slime_here, letters, tmp_path):
    labels(tmp_path, r"\frac12", "7")
    checked = slime_here("check", letters, "--rm-type", "math")
    assert r"the reward accepts all 2 gold answers written as '\\boxed{LABEL}'" in checked.stdout
    assert checked.returncode == 0


def test_check_takes_each_gold_answer_in_the_form_that_its_own_reward_wants(slime_here, letters, tmp_path):
    rows = [
        {"input": "a", "label": "7", "metadata": {"rm_type": name}} for name in ("math", "gsm8k", "exact")
    ]
    (tmp_path / "letters.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    checked = slime_here("check", letters, "--rm-type", "math", "--metadata-key", "metadata")
    assert "accepts all 3 gold answers, each in a form that its own reward wants" in checked.stdout


def test_check_shows_a_gold_answer_that_fails_its_own_reward(slime_here, letters, tmp_path):
    labels(tmp_path, "7", "$$")
    checked = slime_here("check", letters, "--rm-type", "math")
    assert "refuses 1 of 2 gold answers in every form" in checked.stdout
    assert "label '$$' gets 0 {'answer': '$$', 'why': 'empty'}" in checked.stdout


def test_check_refuses_gold_answers_that_the_reward_cannot_score(slime_here, letters, tmp_path):
    labels(tmp_path, "7", "seven")
    checked = slime_here("check", letters, "--rm-type", "gsm8k")
    assert checked.returncode == 2
    assert "cannot score 1 of 2 gold answers in any form" in checked.stderr
    assert "label is 'seven'; wanted a number" in checked.stderr


def test_check_refuses_a_reward_that_lacks_a_part_which_the_estimator_reads(slime_here, letters, tmp_path):
    labels(tmp_path, "7")
    flags = ["--rm-type", "dapo", "--advantage-estimator", "gdpo", "--normalize-advantages", "--gdpo-weights"]
    checked = slime_here("check", letters, *flags, '{"acc": 1.0, "format": 0.5}')
    assert checked.returncode == 2
    assert "sample 0: its reward has None for the part 'format', wanted a finite number" in checked.stderr
    assert "its numbers are acc, score" in checked.stderr


def test_check_gives_a_group_reward_groups_in_which_all_answer_right(slime_here, letters, tmp_path):
    labels(tmp_path, "b", "c")
    (tmp_path / "loud.py").write_text(
        "def shares(completions, solution, **columns):\n"
        "    return [float(solution[0] != 'c') if len(completions) == 4 else 0.0 for _ in completions]\n"
    )
    options = json.dumps({"path": str(tmp_path / "loud.py"), "function": "shares"})
    checked = slime_here(
        "check",
        letters,
        "--group-rm",
        "--rm-type",
        "trl",
        "--rm-args",
        options,
        "--n-samples-per-prompt",
        "4",
    )
    assert "refuses 1 of 2 gold answers in every form" in checked.stdout, checked.stderr
    assert "label 'c' gets 0" in checked.stdout


def test_rows_of_one_data_set_choose_their_rewards(slime_here, letters, tmp_path):
    rows = [
        {"input": "a", "label": "b", "metadata": {"rm_type": "exact"}},
        {"input": "b", "label": "c"},
        {"input": "c", "label": "d", "metadata": {"rm_type": "boxed_exact"}},
        {"input": "d", "label": "e", "metadata": {"rm_type": "f1"}},
    ]
    (tmp_path / "letters.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = ["--metadata-key", "metadata", "--num-rollout", "1", "--eval-interval", "none"]
    ran = slime_here("train", letters, *flags)
    assert ran.returncode == 0, ran.stderr
    text = (tmp_path / "runs/letters/rollouts/step_000001.jsonl").read_text()
    forms = {}
    for sample in map(json.loads, text.splitlines()):
        forms[sample["metadata"].get("rm_type")] = sample["reward"]
    assert isinstance(forms[None], float)
    assert isinstance(forms["exact"], float)
    assert forms["boxed_exact"] == {"score": 0.0, "details": {"answer": None, "why": "no closed box"}}
    assert set(forms["f1"]) == {"score", "precision", "recall"}


def test_weighted_rewards_train_on_their_sum_each_with_its_own_options(slime_here, letters, tmp_path):
    weights = json.dumps({"slime_core.testing.tabular:next_letter": 1.0, "random": 0.5})
    text = letters.read_text().replace('rm_type = "slime_core.testing.tabular:next_letter"', "")
    letters.write_text(text)
    flags = ["--rm-weights", weights, "--rm-args-of", '{"random": {"seed": 3}}', "--num-rollout", "1"]
    ran = slime_here("train", letters, *flags, "--eval-interval", "none")
    assert ran.returncode == 0, ran.stderr
    lines = (tmp_path / "runs/letters/rollouts/step_000001.jsonl").read_text().splitlines()
    for sample in map(json.loads, lines):
        reward = sample["reward"]
        assert reward["random"] == random(Sample(index=sample["index"]), seed=3)
        parts = reward["slime_core.testing.tabular:next_letter"], reward["random"]
        assert reward["score"] == parts[0] + 0.5 * parts[1]
