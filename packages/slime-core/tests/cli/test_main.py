"""The edge of the `slime` command: what an error looks like, and its exit status."""

from __future__ import annotations

import sys
from types import SimpleNamespace

from slime_core.cli import main
from slime_core.errors import DataError


def test_an_error_is_shown_with_its_notes_and_without_a_traceback(monkeypatch, capsys):
    def fail(argv):
        error = DataError("line 3: found nothing")
        error.add_note("the other side failed, too")
        raise error

    monkeypatch.setitem(sys.modules, "a_command", SimpleNamespace(main=fail))
    monkeypatch.setitem(main.COMMANDS, "fail", ("a_command", ""))
    assert main.run(["fail"]) == 2
    assert capsys.readouterr().err == (
        "slime fail: DataError\n  line 3: found nothing\n  the other side failed, too\n"
    )
