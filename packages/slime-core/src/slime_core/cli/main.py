"""The `slime` command: a table of subcommands and those of plugins, each imported only when it is called."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable

from slime_core.errors import TRACEBACK, Interrupted, SlimeError, exit_status
from slime_core.runtime.processes.command_process import COMMAND, CommandProcess

#: Command -> (module, one-line help). Static, so that none is imported for the help text.
COMMANDS = {
    "train": ("slime_core.cli.train", "train a model from a recipe; run it again to resume"),
    "eval": (
        "slime_core.cli.evaluate",
        "evaluate a model, or a run's newest checkpoint, on held-out prompts",
    ),
    "samples": ("slime_core.cli.rundir.samples", "print samples of a run: prompt, response, reward, and why"),
    "top": ("slime_core.cli.rundir.top", "show what a run is doing, live, from the files of its folder"),
    "trace": ("slime_core.cli.rundir.trace", "write the timeline of a run as a file for Perfetto"),
    "replay": (
        "slime_core.cli.rundir.replay",
        "train a recorded step again, and compare its metrics bit for bit",
    ),
    "diff": ("slime_core.cli.rundir.diff", "say in which step, sample and token two runs first differ"),
    "check": ("slime_core.cli.check", "check a recipe and its data without starting anything"),
    "plugins": ("slime_core.cli.plugins", "list, show and check installed plugins"),
    "rm": ("slime_core.cli.rm", "list rewards; score one response with one, and say why"),
    "config": ("slime_core.cli.config", "show resolved settings, or all flags"),
    "bench": ("slime_core.cli.bench", "run a benchmark"),
    "doctor": ("slime_core.cli.doctor", "say what this machine has, what is installed, and what is missing"),
}


def main() -> None:
    """Run the command line and exit with its status: 0 done, 1 failed while running, 2 bad input."""
    _see_working_directory()
    process = CommandProcess()
    COMMAND.set(process)
    try:
        with process.hearing_signals():
            status = run(sys.argv[1:])
    except BrokenPipeError:
        process.end(
            141
        )  # the reader went away: like a program that SIGPIPE ended, without a traceback at exit
    except Interrupted as error:
        status = exit_status(error)
    except SystemExit as end:
        status = _status_of(end)
    except BaseException:
        traceback.print_exc()  # a mistake of ours, outside of a run
        status = 1
    process.leave(status)


def run(argv: list[str]) -> int:
    """Run one subcommand; returns the exit status."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if argv else 2
    if argv[0] in ("-V", "--version"):
        from importlib.metadata import version

        print(f"slime-core {version('slime-core')}")
        return 0
    name, *rest = argv
    try:
        command = _command(name)
        if command is None:
            print(_unknown(name), file=sys.stderr)
            return 2
        return command(rest)
    except SlimeError as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        print(f"slime {name}: {type(error).__name__}\n{_indent(text)}", file=sys.stderr)
        return exit_status(error)
    except Exception as error:
        logged = getattr(error, "__notes__", [])
        if not any(note.startswith(TRACEBACK) for note in logged):
            raise
        text = "\n".join([str(error), *logged])
        print(f"slime {name}: {type(error).__name__}\n{_indent(text)}", file=sys.stderr)
        return 1


def _status_of(end: SystemExit) -> int:
    """Return the exit status that `sys.exit` was called with; text is an error, and is printed."""
    if end.code is None or isinstance(end.code, int):
        return end.code or 0
    print(end.code, file=sys.stderr)
    return 1


def usage() -> str:
    """Return the help text."""
    about = {name: summary for name, (_, summary) in COMMANDS.items()}
    about |= {name: f"from {distribution}" for name, distribution in _plugin_commands().items()}
    width = max(map(len, about)) + 2
    commands = "\n".join(f"  {name:<{width}}{summary}" for name, summary in about.items())
    return (
        "usage: slime COMMAND [ARGUMENTS]\n\n"
        "RL post-training for language models: roll out, score, train, sync, again.\n\n"
        f"commands:\n{commands}\n\n"
        "`slime COMMAND --help` tells more about a command; `slime config flags` lists every setting."
    )


def _see_working_directory() -> None:
    """Let `module:function` name a file of the user's own; at the end of the path, so that it hides nothing installed."""
    with contextlib.suppress(FileNotFoundError):  # the directory may be deleted
        if (folder := os.getcwd()) not in sys.path:
            sys.path.append(folder)


def _command(name: str) -> Callable[[list[str]], int] | None:
    """Return what runs a command of ours, or of a plugin; None where there is none of that name."""
    if name in COMMANDS:
        command: Callable[[list[str]], int] = importlib.import_module(COMMANDS[name][0]).main
        return command
    if name in _plugin_commands():
        from slime_core.plugins.registry import Registry

        plugin: Callable[[list[str]], int] = Registry.from_environment().resolve("slime.commands", name)
        return plugin
    return None


def _plugin_commands() -> dict[str, str]:
    """Return command -> the distributions that bring it.

    Straight from the installed metadata: a registry takes twice as long, and help is to be there at once. Whether
    `SLIME_PLUGINS` allows a command is seen when it is called.
    """
    from importlib.metadata import entry_points

    found: dict[str, str] = {}
    for point in entry_points(group="slime.commands"):
        distribution = "" if point.dist is None else point.dist.name
        if point.name not in COMMANDS:
            found[point.name] = (
                f"{found[point.name]} and {distribution}" if point.name in found else distribution
            )
    return found


def _unknown(name: str) -> str:
    import difflib

    from slime_core.plugins.index import home_of_name

    if home := home_of_name("slime.commands", name):
        return f"slime: the command {name!r} is of {home}, which is not installed"
    near = difflib.get_close_matches(name, [*COMMANDS, *_plugin_commands()], n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return f"slime: no command is named {name!r}{hint}\n\n{usage()}"


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
