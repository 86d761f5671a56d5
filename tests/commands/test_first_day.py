"""What a new user meets first: all mistakes in one report, before anything heavy; a first line at once; an answer when all is done."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from slime_core.cli import main
from slime_core.config.load import load_settings
from slime_core.plugins.registry import Registry

pytestmark = pytest.mark.timeout(200)

HEAVY = "{'torch', 'transformers', 'megatron', 'sglang', 'ray', 'reasoning_gym', 'sympy'}"


@pytest.fixture
def alone(tmp_path):
    """Run a command in a process that then prints its status and which heavy modules it imported; returns the lines."""

    def run(*words: str, watch: str = "") -> list[str]:
        code = (
            f"import sys\n{watch}\nfrom slime_core.cli.main import run\nstatus = run({list(map(str, words))!r})\n"
            f"print(status, sorted({HEAVY} & set(sys.modules)))\n"
        )
        ended = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=120
        )
        assert ended.returncode == 0, ended.stderr
        return [*ended.stderr.splitlines(), *ended.stdout.splitlines()]

    return run


#: The stack that takes seconds to import.
REAL = ["--train-backend", "megatron", "--rollout-engine", "torch", "--tokenizer", "hf"]
WRONG = [
    "--rm-type", "exct", "--lrr", "1e-5", "--advantage-estimator", "grpoo", "--rollout-engine", "vllm",
    "--prompt-data", "nope.jsonl", "--hf-checkpoint", "nowhere", "--seed", "1.5", "--n-samples-per-prompt", "3",
    "--global-batch-size", "5", "--custom-generate-function-path", "os:getcwd", "--min-lr", "x",
    "--custom-megatron-init-path", "nope.py", "--wandb-key", "k", "--load", "no-run", "--eval-prompt-data", "a", "b.jsonl",
]  # fmt: skip
SAID = [
    "--lrr: found an unknown flag; wanted '--lr' (the nearest name)",
    "--wandb-key: found an unknown flag; wanted the key by `wandb login`, or in the variable WANDB_API_KEY",
    "--seed: found '1.5'; wanted a whole number of at least 0",
    "--min-lr: found 'x'; wanted a number of at least 0",
    "4 x 3 = 12, and 5 x 2 = 10; wanted equal products",
    "reward.rm_type (--rm-type): found 'exct'; wanted slime.rewards: no plugin is named 'exct'; did you mean 'exact'?",
    "algorithm.advantage_estimator (--advantage-estimator): found 'grpoo'; wanted slime.advantages: no plugin is named "
    "'grpoo'; did you mean 'grpo'?",
    "rollout.rollout_engine (--rollout-engine): found 'vllm'; wanted slime.engines: no plugin is named 'vllm'; installed: ",
    "rollout.custom_generate_function_path (--custom-generate-function-path): found 'os:getcwd': the signature ()",
    "megatron.custom_megatron_init_path (--custom-megatron-init-path): found 'nope.py'",
    "data.prompt_data: nope.jsonl: found nothing; wanted a data file",
    "eval.eval_prompt_data: b.jsonl: found nothing; wanted a data file",
    "model.hf_checkpoint: found 'nowhere'; wanted a Hugging Face folder, or one of: smollm2-135m",
    "checkpoint.load: found 'no-run', which holds no checkpoint; wanted the folder of a run",
]


@pytest.mark.parametrize("command", ["check", "train", "eval"])
def test_one_report_has_all_mistakes_and_imports_nothing_heavy(alone, letters, command):
    lines = alone(command, letters, *WRONG)
    assert lines[-1] == "2 []"
    for said in SAID:
        assert sum(said in line for line in lines) == 1, said
    problems = [line for line in lines if "found " in line]
    assert len(problems) == len(SAID), "nothing follows from what is wrong already"


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_missing_data_file_is_told_before_anything_heavy_is_imported(alone, letters, command):
    lines = alone(command, letters, *REAL, "--prompt-data", "nope.jsonl")
    assert "  data.prompt_data: nope.jsonl: found nothing; wanted a data file" in lines
    assert lines[-1] == "2 []"


#: Notes, as the first text is written, what has been imported by then.
WATCH = """
class Watched:
    seen = None
    def write(self, text):
        if self.seen is None:
            self.seen = sorted({'torch', 'numpy', 'pydantic', 'rich', 'pluggy'} & set(sys.modules))
        return sys.__stdout__.write(text)
    def flush(self):
        sys.__stdout__.flush()
sys.stdout = Watched()
import atexit
atexit.register(lambda: sys.__stdout__.write(f'\\n{sys.stdout.seen}\\n'))
"""


def test_the_first_line_of_a_run_comes_before_settings_are_read(alone, letters):
    lines = alone("train", letters, *REAL, "--prompt-data", "nope.jsonl", watch=WATCH)
    assert f"slime train: reading {letters}, 4 flags" in lines
    assert lines[-1] == "[]"


def test_a_run_says_what_it_does_before_its_first_step(letters, capsys):
    assert main.run(["train", str(letters), "--num-rollout", "1"]) == 0
    first, plan, *lines = capsys.readouterr().out.splitlines()
    assert first == f"slime train: reading {letters}, 1 flags"
    assert plan.startswith(f"run {letters.parent}/runs/letters: 1 steps of 4 prompts x 16 samples; model ")
    said = [line.partition(" s  ")[2].split()[0] for line in lines if " s  " in line]
    assert said == ["importing", "reading", "reading", "reading", "starting", "starting"]


def done_before(recipe: Path, *flags: str, steps: int) -> Path:
    """Leave a folder as a run of these settings would that took all its steps."""
    settings = load_settings([str(recipe)], flags, registry=Registry())
    folder = recipe.parent / "runs/letters"
    folder.mkdir(parents=True)
    (folder / "config.toml").write_text(settings.to_toml())
    summary = {"status": "completed", "steps": steps, "eval_before": 0.25, "eval_after": 0.5, "wall_s": 3.0}
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.mark.parametrize("length", [["--num-rollout", "12"], ["--num-rollout", "none", "--num-epoch", "5"]])
def test_a_run_that_is_done_says_so_at_once_and_what_can_be_done(alone, letters, length):
    folder = done_before(letters, *REAL, *length, steps=12)
    lines = alone("train", letters, *REAL, *length)
    assert lines[2:] == [
        "nothing to do: completed 12 of 12 steps; held-out accuracy: 0.250 before, 0.500 after (+0.250)",
        f"to go on: --num-rollout 24; anew: --overwrite; look: slime samples {folder}",
        "0 []",
    ]


def test_a_run_that_is_done_is_told_from_one_that_is_to_go_on(letters, capsys):
    assert main.run(["train", str(letters), "--num-rollout", "2"]) == 0
    assert main.run(["train", str(letters), "--num-rollout", "2"]) == 0
    assert "nothing to do: completed 2 of 2 steps" in capsys.readouterr().out
    assert main.run(["train", str(letters), "--num-rollout", "3"]) == 0
    assert "nothing to do" not in capsys.readouterr().out
    assert main.run(["train", str(letters), "--num-rollout", "3", "--overwrite"]) == 0
    assert "nothing to do" not in capsys.readouterr().out


def test_a_flag_of_a_package_that_is_not_installed_names_the_package(letters, capsys):
    """As it is seen where slime-core stands alone."""
    words = [
        "--rollout-num-gpus",
        "2",
        "--eps-clip",
        "0.1",
        "--sglang-mem-fraction-static",
        "0.5",
        "--no-use-tis",
    ]
    code = (
        "from slime_core.plugins.registry import Registry\nfrom slime_core.config.load import read_runs\n"
        f"for p in read_runs([], {words!r}, registry=Registry(allow=[]))[1]: print(p)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    for flag, package in {
        "--rollout-num-gpus": "slime-sglang",
        "--eps-clip": "slime-algos",
        "--sglang-mem-fraction-static": "slime-sglang",
        "--no-use-tis": "slime-algos",
    }.items():
        assert f"{flag}: found an unknown flag; wanted {package}, which brings it; install it" in said


def test_a_users_own_functions_are_looked_at_in_the_first_report(letters, tmp_path, capsys, monkeypatch):
    (tmp_path / "own_functions.py").write_text(
        "def generate(ctx, sample, params): ...\n"
        "def keep(group, other, more): ...\n"  # of two arguments it would be one of the reference system's
        "async def loss(view, advantages): ...\n"
        "def estimate(): ...\n"
        "def reward(sample, other, more): ...\n"
        "class Reducer:\n    def __call__(self): ...\n"
        "broken = 1 / 1\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    flags = {
        "--custom-generate-function-path": ("own_functions:generate", "a function that is not async"),
        "--dynamic-sampling-filter-path": ("own_functions:keep", "the signature (group, other, more)"),
        "--custom-loss-function-path": ("own_functions:loss", "an async function"),
        "--custom-advantage-function-path": ("own_functions:estimate", "the signature ()"),
        "--custom-rm-path": ("own_functions:reward", "the signature (sample, other, more)"),
        "--custom-pg-loss-reducer-function-path": ("own_functions:broken", "1.0, which is float"),
        "--rollout-function-path": ("own_functions:nothing", "AttributeError"),
    }
    words = [word for flag, (reference, _) in flags.items() for word in (flag, reference)]
    assert main.run(["check", str(letters), *words]) == 2
    said = capsys.readouterr().err
    for flag, (reference, found) in flags.items():
        (line,) = [line for line in said.splitlines() if f"({flag})" in line]
        assert repr(reference) in line
        assert found in line


def test_a_row_that_chooses_a_reward_that_is_not_there_is_named(letters, capsys):
    path = letters.parent / "letters.jsonl"
    rows = path.read_text().splitlines()
    rows[3] = '{"input": "d", "label": "x", "metadata": {"rm_type": "exct"}}'
    path.write_text("\n".join(rows))
    for command in ("check", "train"):
        assert main.run([command, str(letters), "--eval-interval", "none"]) == 2
        assert (
            f"{path}:4: metadata rm_type: found 'exct'; wanted the name of a reward:"
            in capsys.readouterr().err
        )
    assert not (letters.parent / "runs").exists()
    own = [*map(str, ["--rm-type", "none", "--custom-rm-path", "slime_core.testing.tabular:next_letter"])]
    assert main.run(["check", str(letters), "--eval-interval", "none", *own]) == 0  # which rows cannot change


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--reward-key", "acc"], "reward.reward_key: found 'acc' of a reward that is the number 0.0"),
        (["--reward-key", "nope", "--rm-type", "mine:graded"], "found 'nope', of which the reward makes None; wanted one of acc"),
        (["--reward-key", "acc", "--eval-reward-key", "why", "--rm-type", "mine:graded"], "reward.eval_reward_key: found 'why'"),
    ],
)  # fmt: skip
def test_a_reward_key_that_the_reward_lacks_is_refused_before_the_start(letters, tmp_path, flags, said):
    (tmp_path / "mine.py").write_text("def graded(sample):\n    return {'acc': 1.0, 'why': 'x'}\n")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-m", "slime_core", "train", str(letters), *flags]
    ended = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert ended.returncode == 2
    assert said in ended.stderr
    assert not (tmp_path / "runs").exists()


def test_the_list_of_rewards_says_what_each_gives(capsys):
    assert main.run(["rm", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (math,) = [line for line in lines if line.startswith("math ")]
    assert "slime-rm" in math
    assert "Score 1.0 when" in math
    assert any(line.startswith("majority (with --group-rm)") for line in lines)


def test_responses_that_a_context_has_no_room_for_are_refused(letters, tmp_path, capsys):
    engine = (
        "from slime_core.config.factories import EngineFactory\n"
        "from slime_core.testing import tabular\n"
        "def create_engine(build):\n    return tabular.create_engine(build)\n"
        "create_engine = EngineFactory(create_engine, tabular.TabularEngine.capabilities, lambda build: 8)\n"
    )
    (tmp_path / "small_engine.py").write_text(engine)
    sys.path.insert(0, str(tmp_path))
    try:
        own = ["--rollout-engine", "small_engine:create_engine", "--eval-interval", "none"]
        for flags, said in (
            (
                ["--rollout-max-response-len", "8"],
                "rollout.rollout_max_response_len: found 8 with a context of 8 tokens",
            ),
            (
                ["--rollout-max-context-len", "9"],
                "rollout.rollout_max_context_len: found 9 with a context of 8 tokens",
            ),
            (["--eval-max-response-len", "20"], "eval.eval_max_response_len: found 20"),
        ):
            assert main.run(["train", str(letters), *own, *flags]) == 2
            assert said in capsys.readouterr().err
        (tmp_path / "letters.jsonl").write_text(
            '{"input": "ab", "label": "x"}\n{"input": "abcdefgh", "label": "x"}\n'
        )
        assert main.run(["train", str(letters), *own]) == 2
        assert "letters.jsonl:2: found a prompt of 8 tokens; wanted at most 7" in capsys.readouterr().err
    finally:
        sys.path.remove(str(tmp_path))
    assert not (tmp_path / "runs").exists()


def test_a_run_whose_parts_need_no_heavy_package_imports_none(alone, letters):
    assert alone("train", letters, "--num-rollout", "1")[-1] == "0 []"
