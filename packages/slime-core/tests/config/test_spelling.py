"""How recipes and flags are spelled: slips are told once, with what is meant, and a tilde is the user's home."""

from __future__ import annotations

from pathlib import Path

import pytest
from slime_core.cli.arguments import split
from slime_core.config.load import load_settings, read_runs
from slime_core.config.parsing.words import value_of

from .recipes import RECIPE, problems


@pytest.mark.parametrize(
    ("line", "n"),
    [("input_kye = 'a'", 1), ("rollout_max_prompt_len = 0", 1), ("tool_key = 3\nlabel_key = 3", 2)],
)
def test_a_mistake_beside_prompt_data_is_told_alone(registry_of, recipe, tmp_path, line, n):
    (tmp_path / "ab.jsonl").write_text('{"input": "a"}\n')
    second = tmp_path / "second.toml"
    second.write_text(f'[data]\nprompt_data = "{tmp_path}/ab.jsonl"\n{line}\n')
    [stage], found = read_runs([recipe, str(second)], [], registry=registry_of())
    assert len(found) == n and stage.settings.data.prompt_data == [f"{tmp_path}/ab.jsonl"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("lr = 3", "lr: found a setting outside of a section; wanted it in [train]"),
        ("lrr = 3", "lrr: found a setting outside of a section; wanted 'lr' (the nearest name)"),
        ("train = 3", "train: found 3; wanted a table: [train]"),
        ("[[train]]", "train: found a list of tables, [[train]]; wanted a table: [train]"),
    ],
)
def test_settings_outside_of_their_table_are_told_where_they_belong(registry_of, tmp_path, line, said):
    path = tmp_path / "r.toml"
    path.write_text(f"{line}\n{RECIPE}")
    (found,) = problems(lambda: load_settings([str(path)], [], registry=registry_of()))
    assert found == f"{path}: {said}"


def test_a_byte_order_mark_before_a_recipe_is_read_over(registry_of, tmp_path):
    path = tmp_path / "r.toml"
    path.write_text(RECIPE, encoding="utf-8-sig")
    assert load_settings([str(path)], [], registry=registry_of()).rollout.rollout_batch_size == 4


@pytest.mark.parametrize("word", ["-lr", "\u2013lr", "\u2014lr", "\u2212-min-lr", "-min_lr"])
def test_flags_behind_other_dashes_are_told_to_begin_with_two_hyphens(load, recipe, word):
    name = word.lstrip("-\u2013\u2014\u2212")
    (found,) = problems(load, "--bf16", word, "1")
    assert found == f"{word}: found a flag behind another dash; wanted two hyphens: --{name}"
    (found,) = problems(split, [recipe, word, "1"])
    assert found == f"{word}: found a dash before a recipe; wanted two hyphens before a flag: --lr 1e-6"


def test_a_list_of_tables_may_be_one_word_of_a_flag():
    annotation = list[dict[str, int]]
    assert value_of(annotation, ['[{"a": 1}]']) == value_of(annotation, ['{"a": 1}']) == [{"a": 1}]
    with pytest.raises(ValueError, match=r"a JSON list \(Expecting"):
        value_of(annotation, ["[{"])


def test_a_tilde_in_paths_is_the_home_of_the_user(load, monkeypatch):
    monkeypatch.setenv("HOME", "/home/of")
    settings = load(
        "--output-dir", "~/runs", "--hf-checkpoint", "~/m", "--save-hf", "~/out/{step}", "--load", "~", "--media-root", "~/media",
        "--prompt-data", "a", "~/a.jsonl", "b", "hf:~/b?split=test", "--eval-prompt-data", "c", "~/c.jsonl@[:3]",
        "--eval-config", "~/sets.toml", "--update-weight-disk-dir", "~/weights", "--run-name", "~",
    )  # fmt: skip
    run, data, evaluation, checkpoint = settings.run, settings.data, settings.eval, settings.checkpoint
    assert (run.output_dir, run.run_name, settings.model.hf_checkpoint) == (
        "/home/of/runs",
        "~",
        "/home/of/m",
    )
    assert (checkpoint.save_hf, checkpoint.load, data.media_root) == (
        "/home/of/out/{step}",
        "/home/of",
        "/home/of/media",
    )
    assert data.prompt_data == ["a", "/home/of/a.jsonl", "b", "hf:/home/of/b?split=test"]
    assert evaluation.eval_prompt_data == ["c", "/home/of/c.jsonl@[:3]"]
    assert evaluation.eval_config == "/home/of/sets.toml"
    assert settings.train.update_weight_disk_dir == "/home/of/weights"


def test_a_tilde_in_a_recipe_and_in_sections_of_paths_is_the_home_of_the_user(
    registry_of, recipe, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", "/home/of")
    second = tmp_path / "second.toml"
    second.write_text('[run]\noutput_dir = "~/runs"\n[data]\nprompt_data = "~/a.jsonl"\n')
    settings = load_settings([recipe, str(second)], [], registry=registry_of())
    assert (settings.run.output_dir, settings.data.prompt_data) == ("/home/of/runs", ["/home/of/a.jsonl"])
    assert value_of(Path | None, ["~/x"]) == Path("/home/of/x")
