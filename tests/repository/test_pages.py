"""The guides do what they say: each command of `your-own-data.md` is run word for word, each metric stands in `metrics.md`."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from itertools import batched
from pathlib import Path

import pytest
from slime_core.config.load import load_settings, load_stages
from slime_core.launch.local import drive
from slime_core.plugins.registry import Registry
from slime_core.run.assemble import assemble
from slime_core.rundir.records import read_records
from slime_core.testing.contracts import check_rollout

pytestmark = pytest.mark.timeout(900)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.S)


def commands(page: Path) -> list[list[str]]:
    lines = "".join(blocks(page, "console")).splitlines()
    return [shlex.split(line.removeprefix("$ ")) for line in lines if line.startswith("$ ")]


def known_metrics(root: Path) -> re.Pattern[str]:
    """The names in the first column of the tables: a part in capitals stands for any, `/max` for the last part of another."""
    names: list[str] = []
    for cell in re.findall(r"^\| (`.*?) \|", (root / "docs/metrics.md").read_text(), re.M):
        for name in re.findall(r"`([^`]+)`", cell):
            names.append(names[-1].rpartition("/")[0] + name if name.startswith("/") else name)
    return re.compile("|".join(re.sub(r"[A-Z]+", ".+", re.escape(name)) for name in names))


def reported(run: Path) -> set[str]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {name for row in rows for name in row} - {"step"}


@pytest.fixture(scope="module")
def followed(root: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each command of the page printed, in a folder that has of the repository what the page names; and `folder`."""
    folder = tmp_path_factory.mktemp("follows")
    shutil.copytree(root / "recipes", folder / "recipes")
    shutil.copytree(root / "docs/examples", folder / "docs/examples")
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    said = {"folder": str(folder)}
    for words in commands(root / "docs/your-own-data.md"):
        done = subprocess.run(
            words, cwd=folder, env=os.environ | {"PATH": path}, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, f"{shlex.join(words)}\n{done.stdout}{done.stderr}"
        said[shlex.join(words[1:2])] = said.get(shlex.join(words[1:2]), "") + done.stdout
    return said


@pytest.mark.faults
@pytest.mark.slow
def test_the_page_on_your_own_data_does_what_it_says(followed):
    assert set(followed) == {"folder", "rm", "check", "train", "samples", "eval"}
    assert "score: 0.1" in followed["rm"] and "the first number is 12" in followed["rm"]
    assert "the reward accepts all 20 gold answers" in followed["check"]
    assert re.search(r"^step 3/3 .*train .*save ", followed["train"], re.M)
    assert "held-out accuracy:" in followed["train"]
    assert followed["samples"].count("the first number is ") == 3
    assert "eval/counting-pass@1" in json.loads(followed["eval"])
    assert (Path(followed["folder"]) / "runs/own-data-eval/metrics.jsonl").exists()


@pytest.mark.faults
@pytest.mark.slow
def test_the_estimate_of_a_checkpoints_size_is_true(followed):
    (told,) = re.findall(r"about ([\d.]+) GB each \(estimated\)", followed["train"])
    folder = Path(followed["folder"]) / "runs/own-data/checkpoints/step_000003"
    found = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    assert float(told) == pytest.approx(found / 1e9, abs=0.1)


@pytest.mark.faults
@pytest.mark.slow
def test_every_metric_of_a_grpo_run_stands_on_the_page(followed, root):
    found = reported(Path(followed["folder"]) / "runs/own-data")
    assert {"train/grad_norm", "rollout/raw_reward", "eval/counting-pass@1", "perf/step_time"} <= found
    known = known_metrics(root)
    assert [name for name in sorted(found) if not known.fullmatch(name)] == []


@pytest.mark.slow
@pytest.mark.faults
def test_every_metric_of_supervised_fine_tuning_stands_on_the_page(root, slime, tiny_llama, tmp_path):
    flags = ["--hf-checkpoint", tiny_llama, "--num-rollout", "2", "--output-dir", tmp_path, "--no-save-last"]
    done = slime("train", "recipes/chat.toml", *flags)
    assert done.returncode == 0, done.stderr
    found = reported(tmp_path / "chat")
    assert {"train/loss", "train/lr"} <= found
    known = known_metrics(root)
    assert [name for name in sorted(found) if not known.fullmatch(name)] == []


def test_a_metric_that_is_not_on_the_page_is_found(root):
    known = known_metrics(root)
    for name in ("train/loss", "rollout/response_len/median", "eval/a-pass@4", "rollout/zero_std/count_0.5"):
        assert known.fullmatch(name)
    for name in ("train/gain", "rollout/response_len/mode", "perf/lunch_time"):
        assert not known.fullmatch(name)


@pytest.mark.parametrize(
    ("page", "files"),
    [
        ("your-own-data.md", ["docs/examples/own_reward.py", "recipes/own-data.toml"]),
        ("generators.md", ["docs/examples/second_chance.py", "docs/examples/own_rollout.py"]),
        ("write-an-algorithm.md", ["docs/examples/own_algorithm.py"]),
    ],
)
def test_pages_quote_their_files_word_for_word(root, page, files):
    quoted = re.findall(r"```[a-z]*\n(.*?)```", (root / "docs" / page).read_text(), re.S)
    assert [file for file in files if (root / file).read_text() not in quoted] == []


def test_the_rollout_function_of_the_guide_drops_the_easier_half_of_what_is_generated(root, monkeypatch):
    monkeypatch.syspath_prepend(str(root))
    from docs.examples.own_rollout import without_the_easiest

    kept, dropped = [], []

    async def watched(run, step):
        record = run.record_drop
        run.record_drop = lambda group, reason: (dropped.append(group), record(group, reason))
        groups = await without_the_easiest(run, step)
        run.record_drop = record
        kept.append(groups)
        return groups

    check_rollout(watched)
    check_rollout(without_the_easiest, "--loop", "one-step-off")
    assert len(kept) > 1
    for groups, easier in zip(kept, batched(dropped, len(kept[0])), strict=True):
        assert max(map(total, groups)) <= min(map(total, easier))


def total(group):
    return sum(sample.reward for sample in group)


def test_the_row_that_the_page_shows_is_in_the_file(root):
    row, _ = blocks(root / "docs/your-own-data.md", "json")
    assert row in (root / "recipes/data/questions.jsonl").read_text()


def test_recipes_read_and_their_files_are_there(root):
    registry = Registry()
    for recipe in sorted((root / "recipes").glob("*.toml")):
        for stage in load_stages([str(recipe)], [], registry=registry):
            data = stage.settings.data.prompt_data
            assert all((root / file).is_file() for file in data[1::2] or data), recipe.name


def put_in(sample):
    """Return how many tokens of the response were not generated."""
    return sum(end - begin for begin, end in sample["environment_spans"])


def test_the_generator_of_the_guide_masks_the_remark_and_keeps_its_budget(
    root, letters, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(str(root))
    rows = [{"input": letter, "label": "x", "metadata": {"remark": "zz"}} for letter in "abcdefghij"]
    (tmp_path / "letters.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [
        "--custom-generate-function-path",
        "docs.examples.second_chance:second_chance",
        "--num-rollout",
        "3",
    ]
    flags += [
        "--rollout-max-response-len",
        "8",
        "--over-sampling-batch-size",
        "6",
        "--rollout-stop-token-ids",
        "5",
    ]
    registry = Registry()
    settings = load_settings([str(letters)], flags, registry=registry)

    async def main() -> dict[str, object]:
        return await drive(await assemble(settings, registry))

    assert asyncio.run(main())["status"] == "completed"
    files = sorted((tmp_path / "runs/letters/rollouts").glob("step_*.jsonl"))
    samples = [sample for file in files for sample in read_records(file)]
    assert max(sample["response_length"] - put_in(sample) for sample in samples) == 8
    turned = [sample for sample in samples if sample["loss_mask"] and 0 in sample["loss_mask"]]
    assert turned
    for sample in turned:
        first = sample["loss_mask"].index(0)
        assert (
            sample["loss_mask"][first : first + 2] == [0, 0] and sum(m == 0 for m in sample["loss_mask"]) == 2
        )
        prompt = len(sample["tokens"]) - sample["response_length"]
        assert sample["tokens"][prompt + first : prompt + first + 2] == [25, 25]  # the remark, zz
        assert sample["rollout_log_probs"][first : first + 2] == [0.0, 0.0]


def test_messages_of_the_troubleshooting_page_are_those_of_the_code(root):
    """Of each quoted message the longest run of words that do not vary stands in the code."""
    sources = [*root.glob("packages/*/src/**/*.py"), *root.glob("plugins/*/src/**/*.py")]
    code = re.sub(
        r'"\s*f?"', "", "\n".join(path.read_text() for path in sources)
    )  # messages over several lines
    varies = r"'[^']*'|\[.*?\]|\{.*?\}|\S*\d\S*(?: GB)?|runs/\S+|process |\.\.\.|--\w+|[:;()]|\bfound\b|\bwanted\b|No space .*|ValueError|\bnan\b"
    page = (root / "docs/troubleshooting.md").read_text()
    first_cells = re.findall(r"^\| (`.+?) \|", page, re.M)
    messages = [message for cell in first_cells for message in re.findall(r"`([^`]+)`", cell)]
    runs = {message: max(map(str.strip, re.split(varies, message)), key=len) for message in messages}
    assert len(messages) > 12
    assert {message: run for message, run in runs.items() if run not in code} == {}
