"""`slime bench graders`: what it counts, shows and refuses."""

import importlib.util
import json
import sys

import pytest
from slime_bench.graders.command import graders
from slime_bench.graders.peers import LIBRARIES
from slime_core.errors import ConfigError, DataError

pytestmark = pytest.mark.timeout(600)


def cases(tmp_path, *rows):
    path = tmp_path / "cases.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


ROW = {"grader": "exact", "kind": "k", "class": "words", "label": "a", "response": "a", "verdict": 1.0}


def test_a_grader_that_differs_from_its_verdict_is_shown_and_fails(tmp_path, capsys):
    assert graders([cases(tmp_path, ROW), "--peer", "math-verify"]) == 0
    path = cases(tmp_path, ROW, ROW | {"verdict": 0.0})
    assert graders([path, "--peer", "math-verify", "--show-misses", "5"]) == 1
    assert "ours exact: 1, decided 0.0: label 'a', response 'a' (words)" in capsys.readouterr().out


def test_false_accepts_are_counted_apart_from_false_refusals(tmp_path, capsys):
    rows = [ROW, ROW | {"verdict": 0.0}, ROW | {"response": "b", "class": "other"}]
    rows += [ROW | {"label": None, "verdict": "error"}, ROW | {"verdict": "error"}]
    assert graders([cases(tmp_path, *rows), "--peer", "math-verify", "--json"]) == 1
    ours = json.loads(capsys.readouterr().out)["libraries"]["ours"]
    assert {key: ours[key] for key in ("cases", "right", "accepted", "refused", "none")} == {
        "cases": 5,
        "right": 2,
        "accepted": 2,
        "refused": 1,
        "none": 0,
    }
    assert ours["classes"]["other"] == {"cases": 1, "right": 0, "accepted": 0, "refused": 1, "none": 0}


def test_a_class_in_which_another_library_is_better_is_named(tmp_path, capsys):
    right = {
        "grader": "math",
        "kind": "k",
        "class": "sums",
        "label": "4",
        "response": "It is $4$.",
        "verdict": 1.0,
    }
    assert graders([cases(tmp_path, right), "--peer", "math-verify", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["behind"] == ["sums (math-verify)"]


def test_one_class_is_graded_alone_and_absent_libraries_are_named(tmp_path, capsys):
    path = cases(tmp_path, ROW, ROW | {"class": "other", "verdict": 0.0})
    assert graders([path, "--class", "words", "--json"]) == 0
    libraries = json.loads(capsys.readouterr().out)["libraries"]
    assert libraries["ours"]["cases"] == 1
    absent = [name for name, library in LIBRARIES.items() if not library.is_installed()]
    assert [name for name in LIBRARIES if libraries[name] == "not installed"] == absent
    with pytest.raises(ConfigError, match="classes of the cases: other, words"):
        graders([path, "--class", "word"])


def test_bad_input_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"cases\.jsonl:1: found the keys"):
        graders([cases(tmp_path, {"grader": "exact"})])
    (tmp_path / "text.jsonl").write_text("no JSON\n")
    with pytest.raises(DataError, match=r"text\.jsonl:1: found a line that is not JSON"):
        graders([str(tmp_path / "text.jsonl")])
    with pytest.raises(DataError, match="found nothing"):
        graders([str(tmp_path / "none.jsonl")])


def test_the_package_of_slime_compat_is_not_the_reference_system(tmp_path, monkeypatch):
    """Its graders are ours: to compare with them says nothing. A checkout of the reference system is found before it."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "slime"]:
        monkeypatch.delitem(sys.modules, name)
    assert importlib.util.find_spec("slime") is not None
    assert not LIBRARIES["slime"].is_installed()
    (tmp_path / "slime" / "rollout" / "rm_hub").mkdir(parents=True)
    for folder in ("slime", "slime/rollout", "slime/rollout/rm_hub"):
        (tmp_path / folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    assert LIBRARIES["slime"].is_installed()
