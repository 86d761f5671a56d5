"""Whatever a flag chooses: a name that is not there, and a thing that cannot be called as its group is, are refused by the flag."""

from __future__ import annotations

import sys

import pytest
from slime_core.cli import main
from slime_core.plugins.registry import Registry

GROUPS = Registry().groups
CHOICES = [(group.name, flag) for group in GROUPS.values() for flag in group.flags]
#: Flags without which another says no first.
ALSO = {
    "slime.group_rewards": ["--group-rm"],
    "slime.environments": ["--custom-generate-function-path", "multi-turn"],
    "--custom-rm-path": ["--rm-type", "none"],
}


def test_every_flag_that_chooses_is_tried():
    assert len(CHOICES) > 25
    assert {name for name, _ in CHOICES} == GROUPS.keys() - {"slime.commands", "slime.benches", "slime.tools"}


@pytest.mark.parametrize(
    ("reference", "found"),
    [
        ("no-such-name", "no-such-name"),
        ("nosuch:fn", "No module named 'nosuch'"),
        ("mine:missing", "AttributeError"),
        ("mine:nothing", "the signature ()"),
        ("mine:number", "3, which is int"),
    ],
)
@pytest.mark.parametrize(("group", "flag"), CHOICES)
def test_check_refuses_it_and_names_the_flag(
    letters, tmp_path, capsys, monkeypatch, group, flag, reference, found
):
    wrong = (
        "of" if group in ("slime.environments", "slime.tool_formats") else ""
    )  # which are called with nothing
    (tmp_path / "mine.py").write_text(f"def nothing({wrong}): ...\n\n\nnumber = 3\n")
    found = found.replace("()", f"({wrong})")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)  # another test's
    also = [word for key in (group, flag) for word in ALSO.get(key, [])]
    assert main.run(["check", str(letters), *also, flag, reference]) == 2
    said = capsys.readouterr().err
    assert 0 < len(said.splitlines()) < 25
    assert "Traceback" not in said
    (line,) = [line for line in said.splitlines() if f"({flag}): " in line or f" {flag}: " in line]
    assert reference in line
    if GROUPS[group].has and reference == "mine:nothing":
        found = f"wanted {GROUPS[group].contract}"
    assert found in line
