"""Malformed recipes, flags and data files, seeded: each is refused with exit status 2, no traceback, and nothing is written."""

from __future__ import annotations

import json
import random
import string
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from slime_core.checks.settings import check_stages
from slime_core.cli import main
from slime_core.config.load import read_runs
from slime_core.config.parsing.schema import build_schema
from slime_core.config.parsing.words import takes_bool
from slime_core.data.prompts import PromptFormat, build_prompts
from slime_core.data.rows.open_rows import read_rows
from slime_core.errors import DataError
from slime_core.plugins.registry import Registry
from slime_core.testing.tabular import load_tokenizer

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry()


@pytest.fixture
def refused(letters, tmp_path, capsys, monkeypatch):
    """Run a command in this process: it refuses, and leaves the folder as it was; returns what it said."""

    def run(command: str, *words: str, recipe: Path | str = letters) -> str:
        monkeypatch.chdir(tmp_path)
        before = {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")}
        assert main.run([command, str(recipe), *words]) == 2
        said = capsys.readouterr()
        assert "Traceback" not in said.out + said.err
        assert 0 < len(said.err) < 4000
        assert max(map(len, said.err.splitlines())) < 1000
        assert {path: path.is_file() and path.read_bytes() for path in tmp_path.rglob("*")} == before
        return said.err

    return run


HOSTILE = [
    "", "x", "nan", "inf", "-inf", "1e30", "1e999", "-1", "-1e9", "0x10", "1_0x", "9" * 5000, "1.5.2", "\\ud800", "[1",
    "{'a': 1}", '{"a": 1, "a": 2}', "[" * 5000, "null", "1,2", "💥", " ", "\t", "a b",
]  # fmt: skip


def _free(annotation: Any) -> bool:
    """Whether any text is a value."""
    return annotation in (str, Path) or any(
        map(_free, () if get_origin(annotation) in (dict, Literal) else get_args(annotation))
    )


def test_every_setting_refuses_what_it_cannot_be(registry, letters):
    """Each flag that does not take any text, with words that are none of its values; one wrong flag, one problem."""
    schema, draw, n_refused = build_schema(registry), random.Random(0), 0
    for flag in schema.flags.values():
        if _free(flag.info.annotation):
            continue
        for word in draw.sample(HOSTILE, 4):
            stages, problems = read_runs(
                [str(letters)], [flag.spelled, word], registry=registry, schema=schema
            )
            if not problems:  # a few are numbers: -1 for a weight that may have a sign
                float(word)
                continue
            n_refused += 1
            assert [p.where.startswith((flag.spelled, "--")) for p in problems] == [True], (
                flag.spelled,
                word,
            )
            assert "Input" not in str(problems[0])
            assert len(str(problems[0])) < 1000
        check_stages(stages, registry)  # goes on without the value
    assert n_refused > 400


def test_every_number_has_bounds(registry):
    """No setting takes a number that is beyond any use; the one upper bound that may be infinite says so."""
    schema, unbounded = build_schema(registry), []
    for flag in schema.flags.values():
        for value in (10**30, -(10**30), 1e300, float("inf"), float("nan")):
            _, problems = read_runs([], [f"{flag.spelled}={value}"], registry=registry, schema=schema)
            texts = _free(flag.info.annotation) or get_origin(flag.info.annotation) in (dict, Literal)
            if (
                not texts
                and not takes_bool(flag.annotation)
                and not any(flag.spelled in p.where for p in problems)
            ):
                unbounded.append((flag.spelled, value))
    assert [entry for entry in unbounded if entry[0] != "--tis-clip"] == []


FLAGS = [
    ["--lrr", "1"], ["--"], ["---lr", "1"], ["--=3"], ["-lr", "3"], ["--lr"], ["--lr", "1", "2"], ["--no-lr"], ["--no-bf16", "1"],
    ["--set"], ["--set", "x"], ["--set", "train.lr"], ["--set", "train.lr=true"], ["--set", "train.lr=[1]"], ["--set", ".=1"],
    ["--set", "train.lr=" + "[" * 3000], ["--set", "run.seed=" + "9" * 5000], ["--rm-type", "os:path"], ["--rm-type", ""],
    ["--rm-type", ":"], ["--rm-type", "a/b"], ["--rm-type", "..", ], ["--rm-type", "os.path:"], ["--rm-type", "x" * 5000],
    ["--custom-generate-function-path", "os:getcwd"], ["--custom-generate-function-path", "os"], ["--loop", "json:dumps"],
    ["--rollout-engine", "vllm"], ["--train-backend", "none "], ["--prompt-data", "x" * 5000 + ".jsonl"], ["--prompt-data", "/"],
    ["--prompt-data", "a.jsonl@[x]"], ["--prompt-data", "a.jsonl@[" + "9" * 5000 + ":]"], ["--prompt-data", "letters.toml"],
    ["--hf-checkpoint", "x" * 5000], ["--hf-checkpoint", "/dev/null"], ["--hf-checkpoint", ""], ["--load", "x" * 5000],
    ["--eval-prompt-data", "a"], ["--eval-prompt-data", "a", "b.jsonl", "a", "b.jsonl"], ["--rollout-top-k", "0"],
    ["--rollout-max-context-len", "1"], ["--rollout-min-new-tokens", "9"], ["--overlong-buffer-len", "9"], ["--rollout-stop", ""],
    ["--rollout-stop-token-ids", "-1"], ["--rollout-stop-token-ids", "999999999"], ["--reward-key", "nope"], ["--lr", "\udcff"],
    ["--filter-args", '{"x": 1}'], ["--rm-args", '{"x": NaN}'], ["--rm-args", "[" * 100_000], ["--rm-args", '{"nope": 1}'],
    ["--run-name", "a\nb"], ["--run-name", " "], ["--run-name", "a\x07b"], ["--run-name", "a\u202eb"], ["--run-name", "a/ "],
    ["--eval-prompt-data", "", "letters.jsonl"], ["--eval-prompt-data", "a\n", "letters.jsonl"],
    ["--prompt-data", "", "letters.jsonl", "b", "letters.jsonl"],
    ["--global-batch-size", "48"], ["--num-rollout", "none"], ["--multimodal-keys", '{"image": 3}'], ["stray"],
]  # fmt: skip


@pytest.mark.parametrize(
    "flags", FLAGS, ids=lambda flags: " ".join(flags)[:40].encode("ascii", "replace").decode()
)
def test_flags_that_cannot_be_meant(refused, flags):
    refused("train", *flags)


def _recipes() -> dict[str, bytes]:
    deep = "[" * 3000 + "]" * 3000
    return {
        "nothing": b"",
        "no utf-8": b"\xff\xfe\x00",
        "zero bytes": b"\x00" * 100,
        "a list nested deep": f"x = {deep}".encode(),
        "lists over the depth": ("x = " + "[" * 150 + "]" * 150).encode(),
        "a table nested deep": ("[" + ".".join(["a"] * 2999) + "]\nx = 1").encode(),
        "digits": b"[train]\nlr = " + b"9" * 5000,
        "a date that is none": b"[train]\nlr = 2020-13-45",
        "half a character": b'[run]\nrun_name = "\\ud800"',
        "a zero byte in text": b'[run]\nrun_name = "a\\u0000"',
        "a key twice": b"[run]\nrun_name = 'a'\nrun_name = 'b'",
        "a table twice": b"[run]\n[run]\n",
        "stages that are text": b"stage = 'x'",
        "a stage that is a number": b"[stage]\na = 3",
        "a stage with a bad name": b"[stage.'a b']\nrun.num_rollout = 1",
        "a section that is a list": b"run = [1]",
        "sections in a list": b"[[run]]\nrun_name = 'x'",
        "true as a rate": b"[train]\nlr = true",
        "text as a rate": b"[train]\nlr = '1e-5'",
        "a float as a count": b"[run]\nnum_rollout = 3.0",
        "a batch of 1e30": b"[rollout]\nrollout_batch_size = 1e30",
        "nan": b"[train]\nlr = nan",
        "a misspelt section": b"[rollot]\nrollout_batch_size = 3",
        "words": b"this is no recipe",
    }


@pytest.mark.parametrize("name", list(_recipes()))
def test_recipes_that_are_none(refused, tmp_path, name):
    recipe = tmp_path / "bad.toml"
    recipe.write_bytes(_recipes()[name])
    assert "bad.toml" in refused("check", recipe=recipe) or name == "nothing"


def test_recipes_with_random_damage(registry, letters, tmp_path):
    """Each is read, or refused with problems that say where; whatever is read is checked."""
    draw, text, bad = random.Random(1), letters.read_text(), tmp_path / "bad.toml"
    schema, n_refused = build_schema(registry), 0
    for _ in range(150):
        damaged = list(text)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(damaged))
            damaged[at : at + draw.choice([0, 1, 8])] = draw.choice(
                ["", '"', "[", "]", "=", "\n", "true", "\\", "é", "nan", "-", ".", "'''", "{", "9" * 30]
            )
        bad.write_text("".join(damaged))
        stages, problems = read_runs([str(bad)], [], registry=registry, schema=schema)
        problems += check_stages(stages, registry)
        n_refused += bool(problems)
        assert all(len(str(problem)) < 2000 for problem in problems)
    assert n_refused > 75


ROWS = {
    "no json": "{",
    "a list": "[1]",
    "a number": "3",
    "null": "null",
    "nested deep": "[" * 100_000,
    "a label nested deep": '{"input": "a", "label": ' + "[" * 900 + "]" * 900 + "}",
    "metadata nested deep": '{"input": "a", "label": "x", "metadata": ' + '{"a":' * 900 + "1" + "}" * 901,
    "metadata nested deep in text": json.dumps({"input": "a", "label": "x", "metadata": "[" * 9000}),
    "digits": '{"input": "a", "label": ' + "9" * 5000 + "}",
    "digits in text": json.dumps({"input": "a", "label": "x", "metadata": "9" * 5000}),
    "half a character": '{"input": "\\ud800", "label": "x"}',
    "half a character in a label": '{"input": "a", "label": "\\udfff"}',
    "half a character in a key": '{"input": "a", "label": "x", "\\udc00": 1}',
    "a key twice": '{"input": "a", "label": "x", "label": "y"}',
    "a key twice in metadata": '{"input": "a", "label": "x", "metadata": {"a": 1, "a": 2}}',
    "nan": '{"input": "a", "label": NaN}',
    "infinity": '{"input": "a", "label": "x", "metadata": {"a": -Infinity}}',
    "beyond floats": '{"input": "a", "label": 1e999}',
    "no prompt": '{"label": "x"}',
    "no label": '{"input": "a"}',
    "an empty prompt": '{"input": "", "label": "x"}',
    "a prompt that is a number": '{"input": 3, "label": "x"}',
    "a prompt that is null": '{"input": null, "label": "x"}',
    "no messages": '{"input": [], "label": "x"}',
    "messages without content": '{"input": [{"role": "user"}], "label": "x"}',
    "metadata that is a list": '{"input": "a", "label": "x", "metadata": [1]}',
    "metadata that is text": '{"input": "a", "label": "x", "metadata": "text"}',
    "tools that are a number": '{"input": "a", "label": "x", "tools": 3}',
    "tools that are numbers": '{"input": "a", "label": "x", "tools": [1]}',
    "a reward with a long name": '{"input": "a", "label": "x", "metadata": {"rm_type": "' + "a." * 3000 + 'a:b"}}',
    "a reward that is not there": '{"input": "a", "label": "x", "metadata": {"rm_type": "nope"}}',
    "a reward that is a number": '{"input": "a", "label": "x", "metadata": {"rm_type": 3}}',
    "a reward of the wrong arity": '{"input": "a", "label": "x", "metadata": {"rm_type": "os:getcwd"}}',
    "zero bytes": "\0\0",
}  # fmt: skip


@pytest.mark.parametrize("name", list(ROWS))
def test_rows_that_are_none(refused, tmp_path, name):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"input": "a", "label": "x"}\n' + ROWS[name] + "\n")
    said = refused("train", "--prompt-data", "bad.jsonl", "--eval-interval", "none")
    assert "bad.jsonl:2" in said


def test_rows_with_random_damage(tmp_path):
    draw, path, n_refused = random.Random(2), tmp_path / "bad.jsonl", 0
    good = {"input": "ab", "label": "x", "metadata": {"a": [1, {"b": None}]}, "tools": [{"name": "é"}]}
    tokenizer, layout = load_tokenizer(tmp_path), PromptFormat(label_key="label")
    for _ in range(300):
        damaged = bytearray(json.dumps(good, ensure_ascii=draw.random() < 0.5).encode())
        for _ in range(draw.randint(1, 3)):
            at = draw.randrange(len(damaged))
            new = draw.choice(
                [b"", b'"', b"{", b"]", b"\xff", b"\\u", b"\\ud800", b"NaN", b"1e999", b"\x00", b",", b":"]
            )
            damaged[at : at + draw.choice([0, 1, 5])] = new
        path.write_bytes(bytes(damaged))
        try:
            build_prompts(read_rows(str(path)), tokenizer, prompt_format=layout)
        except DataError as error:
            n_refused += 1
            assert "bad.jsonl" in str(error)
    assert n_refused > 150


def test_unknown_words_get_a_hint_that_is_accepted(registry):
    """Whatever flag is proposed for a misspelling can be given: it is known, and no check refuses it by its name."""
    schema, draw = build_schema(registry), random.Random(3)
    names = sorted(schema.flags)
    for _ in range(200):
        name = list(draw.choice(names))
        name[draw.randrange(len(name))] = draw.choice(string.ascii_lowercase)
        said, meant = schema.meant_by("--" + "".join(name))
        assert meant is None or meant.spelled in said
        if said.startswith("'--"):
            proposed = said.split("'")[1][2:].replace("-", "_")
            assert proposed in schema.flags or schema.find_foreign(proposed) or proposed == "set"
    for word in (
        "--wandb-key",
        "--wandb-entity",
        "--num-layers",
        "--data-path",
        "--micro-batch-size",
        "--train-iters",
    ):
        said, _ = schema.meant_by(word)
        proposed = said.split("'")[1][2:].replace("-", "_") if said.startswith("'--") else None
        assert (
            proposed is None or proposed in schema.flags or proposed not in schema.foreign["megatron"].refused
        ), said
