"""`slime samples` over a run folder that is written by hand."""

from __future__ import annotations

import json

import pytest
from slime_core.cli.rundir.samples import main
from slime_core.errors import ConfigError


def sample(index, reward, **fields):
    return {
        "index": index, "group_index": index // 2, "prompt": f"prompt {index}", "response": f"answer {index}",
        "response_length": 10 - index, "label": None, "reward": reward, "status": "completed", "failure": None,
    } | fields  # fmt: skip


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "a"
    (folder / "rollouts").mkdir(parents=True)
    failed = sample(3, None, status="failed", failure="sample 3: reward timed out after 5 s")
    graded = {"score": 0.5, "format": 1.0, "details": {"reason": "found 7, wanted 8"}}
    chat = [{"role": "user", "content": "hi"}]
    steps = {
        "step_000001": [sample(0, 1.0), sample(1, 0.0, label="8")],
        "step_000002": [sample(2, graded, prompt=chat), failed],
        "eval_step_000000": [sample(0, 0.25)],
    }
    for name, samples in steps.items():
        lines = "".join(json.dumps(each) + "\n" for each in samples)
        (folder / f"rollouts/{name}.jsonl").write_text(lines)
    return folder


@pytest.fixture
def shown(run, capsys):
    """Return a function that returns (step, index) of the samples that flags choose."""

    def rows(*flags):
        assert main([str(run), "--json", *flags]) == 0
        return [(row["step"], row["index"]) for row in map(json.loads, capsys.readouterr().out.splitlines())]

    return rows


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        ([], [(1, 0), (1, 1), (2, 2), (2, 3)]),
        (["--step", "2"], [(2, 2), (2, 3)]),
        (["--step", "last", "1"], [(1, 0), (1, 1), (2, 2), (2, 3)]),
        (["--eval"], [(0, 0)]),
        (["--failed"], [(2, 3)]),
        (["--reward-below", "1"], [(1, 1), (2, 2)]),
        (["--reward-above", "0"], [(1, 0), (2, 2)]),
        (["--reward-above", "0", "--reward-below", "1"], [(2, 2)]),
        (["--group", "1"], [(2, 2), (2, 3)]),
        (["--sort", "reward"], [(1, 1), (2, 2), (1, 0), (2, 3)]),  # without a reward: last
        (["--sort", "reward", "--descending"], [(1, 0), (2, 2), (1, 1), (2, 3)]),
        (["--sort", "length", "--limit", "2"], [(2, 3), (2, 2)]),
        (["--sort", "step", "--descending", "--limit", "2"], [(2, 2), (2, 3)]),
        (["--limit", "0"], [(1, 0), (1, 1), (2, 2), (2, 3)]),
    ],
)
def test_samples_are_chosen_and_sorted(shown, flags, wanted):
    assert shown(*flags) == wanted


def test_a_sample_is_shown_with_its_reward_and_why(run, capsys):
    main([str(run), "--step", "2"])
    text = capsys.readouterr().out
    for part in (
        "step 2 · group 1 · sample 2 · reward 0.5 · 8 tokens", "user: hi", "format: 1.0", "reason: found 7, wanted 8",
        "sample 3 · reward none", "timed out after 5 s", "2 samples of 1 file of",
    ):  # fmt: skip
        assert part in text


def test_long_text_is_wrapped_where_the_output_is_no_terminal(run, capsys):
    (run / "rollouts/step_000003.jsonl").write_text(json.dumps(sample(4, 1.0, response="%" * 500)))
    main([str(run), "--step", "3"])
    text = capsys.readouterr().out
    assert text.count("%") == 500 and max(map(len, text.splitlines())) <= 100


def test_a_response_cannot_command_the_terminal_or_be_taken_for_markup(run, capsys):
    (run / "rollouts/step_000003.jsonl").write_text(
        json.dumps(sample(4, 1.0, response="\x1b[2J [red]no[/red]"))
    )
    main([str(run), "--step", "3"])
    text = capsys.readouterr().out
    assert "\x1b" not in text and "\\x1b[2J [red]no[/red]" in text


def test_a_line_that_a_crash_cut_off_is_named_and_left_out(run, capsys):
    with (run / "rollouts/step_000002.jsonl").open("a") as file:
        file.write('{"index": 4, "resp')
    main([str(run), "--step", "2"])
    captured = capsys.readouterr()
    assert "2 samples of 1 file" in captured.out
    assert "step_000002.jsonl, line 3: no sample in JSON; left out" in captured.err


def test_no_more_is_read_than_is_shown(run, shown):
    (run / "rollouts/step_000002.jsonl").unlink()
    (run / "rollouts/step_000002.jsonl").mkdir()  # to read it would raise
    assert shown("--limit", "1") == [(1, 0)]


def test_the_part_of_the_reward_that_the_run_learns_from_is_the_reward(run, shown):
    (run / "config.toml").write_text('[reward]\nreward_key = "format"\n')
    assert shown("--reward-above", "0.9", "--group", "1") == [(2, 2)]


def test_a_run_without_a_reward_key_learns_from_the_score(run, shown):
    (run / "config.toml").write_text('[reward]\nreward_key = "none"\neval_reward_key = "none"\n')
    assert shown("--reward-above", "0.4", "--reward-below", "0.6") == [(2, 2)]


def test_a_missing_step_is_refused_with_what_there_is(run):
    with pytest.raises(
        ConfigError, match="found step 7; wanted one that is there: steps 1 to 2; --eval shows"
    ):
        main([str(run), "--step", "7"])
    with pytest.raises(
        ConfigError, match="found step 2; wanted one that is there: evaluations after steps 0;"
    ):
        main([str(run), "--eval", "--step", "2"])


def test_a_missing_run_is_refused_with_those_that_are_there(run):
    with pytest.raises(ConfigError, match=f"which does not exist; .*runs that are there: {run}"):
        main([str(run.parent / "b")])
    with pytest.raises(ConfigError, match=f"which has no rollouts; .*runs that are there: {run}"):
        main([str(run.parent)])


@pytest.mark.parametrize(
    "flags", [["--step", "x"], ["--limit", "-1"], ["--sort", "size"], ["--reward-below", "low"]]
)
def test_a_flag_without_sense_ends_with_status_2(run, flags, capsys):
    with pytest.raises(SystemExit, match="2"):
        main([str(run), *flags])
    assert flags[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    "fields",
    [
        {"reward": float("nan")}, {"reward": [1]}, {"reward": "1"}, {"reward": 10**400}, {"reward": {}},
        {"response": "\ud800 half"}, {"response": None}, {"response_length": "long"}, {"prompt": [1, None]},
        {"reward": {"score": 1.0, "details": "plain"}}, {"step": "one"}, {"label": 3}, {"failure": 7},
    ],
)  # fmt: skip
def test_a_sample_of_odd_values_is_shown(run, capsys, fields):
    (run / "rollouts/step_000003.jsonl").write_text(json.dumps(sample(4, 1.0) | fields) + "\n{}\n[]\n")
    for sort in ("reward", "length", "step"):
        assert main([str(run), "--sort", sort]) == 0
    assert "6 samples of 3 files" in capsys.readouterr().out


def test_a_file_is_no_run(run):
    with pytest.raises(ConfigError, match="which has no rollouts"):
        main([str(run / "rollouts/step_000001.jsonl")])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--reward-below", "nan"], "argument --reward-below: found 'nan'; wanted a number"),
        (["--group", "-5"], "argument --group: found '-5'; wanted a whole number, 0 or more"),
        (["--limit", "x"], "argument --limit: found 'x'; wanted a whole number, 0 or more"),
        (["--step", "\u00b2"], "argument --step: found '\u00b2'; wanted a number, or last"),
        (["--lim", "3"], "unrecognized arguments: --lim 3"),
    ],
)
def test_flags_are_written_out_and_numbers_are_numbers(run, capsys, words, message):
    with pytest.raises(SystemExit) as end:
        main([str(run), *words])
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_a_file_of_another_name_is_no_step(run, shown):
    (run / "rollouts/step_\u00b2.jsonl").touch()
    assert shown("--step", "1") == [(1, 0), (1, 1)]


@pytest.mark.parametrize("flags", [["--descending"], ["--eval", "--dropped"]])
def test_flags_that_would_do_nothing_are_refused(run, capsys, flags):
    with pytest.raises(SystemExit) as ended:
        main([str(run), *flags])
    assert ended.value.code == 2
    assert f"argument {flags[-1]}" in capsys.readouterr().err
