"""Files that settings name: which words are files and which are their names."""

from __future__ import annotations

import pytest
from slime_core.checks.input_files import missing_files
from slime_core.plugins.registry import Registry
from slime_core.testing.contracts.runs import tabular_settings

REGISTRY = Registry()


@pytest.mark.parametrize("flag", ["--prompt-data", "--eval-prompt-data"])
@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet@[:3]", "hf:gsm8k", "there"])
def test_files_where_names_are_to_be_are_refused(flag, name, tmp_path):
    (tmp_path / "there").touch()
    (tmp_path / "b.jsonl").write_text('{"input": "a"}\n')
    name = str(tmp_path / name) if name == "there" else name
    words = (flag, name, str(tmp_path / "b.jsonl"), "--eval-interval", "1")
    with tabular_settings(REGISTRY, *words) as settings:
        (problem,) = missing_files(settings, REGISTRY)
    assert f"the file {name!r} where a name is to be" == problem.found
    assert problem.wanted == "a name before each file: math math.jsonl code code.jsonl"
