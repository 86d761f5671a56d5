"""`slime rm`: a reward on one response, outside of any run."""

from __future__ import annotations

import argparse
import asyncio
import inspect
import json
import sys
from typing import Any

from rich.markup import escape
from rich.table import Table

from slime_core.cli.arguments import wide_console
from slime_core.errors import ConfigError, PluginError, Problem, RewardError
from slime_core.files.json_text import parse_json
from slime_core.plugins.bind import choose_options
from slime_core.plugins.registry import Plugin, Registry
from slime_core.rewards.pool import RewardPool
from slime_core.rewards.results import Reward, RewardFailure
from slime_core.samples import Group, Sample, Status

DESCRIPTION = """Score one response as a run would, in a worker with a deadline, and print the score and why; with
--group-rm several, the samples of one prompt, by a group reward. Exit status 0 when there is a score, whatever it is;
2 when the input or the reward is at fault."""


def main(argv: list[str]) -> int:
    """Run the subcommand."""
    arguments = _parse(argv)
    if arguments.command == "list":
        return _list()
    options, metadata = _object("--rm-args", arguments.rm_args), _object("--metadata", arguments.metadata)
    given = [sys.stdin.read() if text == "-" else text for text in arguments.response]
    if len(given) > 1 and not arguments.group_rm:
        wanted = "one; or --group-rm, which scores them as a group"
        raise ConfigError([Problem("--response", f"{len(given)} responses", wanted)])
    group = [
        Sample(
            index=index,
            group_index=0,
            prompt=arguments.prompt,
            response=response,
            label=arguments.label,
            metadata=dict(metadata),
            status=Status.COMPLETED,
        )
        for index, response in enumerate(given)
    ]
    registry = Registry.from_environment()
    plugin = registry.find("slime.group_rewards" if arguments.group_rm else "slime.rewards", arguments.type)
    options = choose_options(registry.load(plugin), where="--rm-args", explicit=options)
    pool = RewardPool(plugin.value, options, workers=1, timeout_s=arguments.timeout_s)
    results = asyncio.run(_score(pool, group, as_group=arguments.group_rm))
    rewards = [result for result in results if isinstance(result, Reward)]
    for result in results:
        if isinstance(result, RewardFailure):
            raise RewardError(result.message)
    if arguments.json:
        values = [reward.value for reward in rewards]
        print(json.dumps(values if arguments.group_rm else values[0], indent=2))
    else:
        print("\n".join(map(_shown, rewards)))
    return 0


def _list() -> int:
    """Print every reward with the first sentence of what it says of itself."""
    registry = Registry.from_environment()
    table = Table("reward", "from", "what it gives", box=None, pad_edge=False, header_style="bold")
    for group, note in (("slime.rewards", ""), ("slime.group_rewards", " (with --group-rm)")):
        for plugin in registry.plugins(group):
            table.add_row(f"{plugin.name}{note}", plugin.distribution, escape(_summary(registry, plugin)))
    wide_console().print(table)
    return 0


def _summary(registry: Registry, plugin: Plugin) -> str:
    try:
        text = inspect.getdoc(registry.load(plugin)) or "(it does not say)"
    except PluginError as error:
        text = f"(cannot be used: {error})"
    paragraph = " ".join(text.split("\n\n")[0].split())
    return paragraph.partition(". ")[0].rstrip(".")


async def _score(pool: RewardPool, group: Group, *, as_group: bool) -> list[Reward | RewardFailure]:
    async with pool:
        return await pool.score_group(group) if as_group else [await pool.score(group[0])]


def _shown(result: Reward) -> str:
    value: dict[str, Any] = result.value if isinstance(result.value, dict) else {"score": result.value}
    lines = [f"{key}: {_text(entry)}" for key, entry in value.items() if key != "details"]
    details = value.get("details", {})
    lines += [f"  {key}: {_text(entry)}" for key, entry in details.items()]
    return "\n".join(lines)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _object(flag: str, text: str) -> dict[str, Any]:
    try:
        value = parse_json(text)
    except ValueError as error:
        raise ConfigError(
            [Problem(flag, f"{text[:60]!r}, which is not JSON ({error})", "a JSON object")]
        ) from error
    if not isinstance(value, dict):
        raise ConfigError([Problem(flag, repr(text[:60]), "a JSON object")])
    return value


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"found {text}; wanted more than 0")
    return value


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="slime rm", description="Rewards, outside of any run.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser(
        "list", help="list the installed rewards", description="Print every reward and what it gives."
    )
    trial = commands.add_parser("try", help="score one response", description=DESCRIPTION, allow_abbrev=False)
    trial.add_argument("type", metavar="TYPE", help="reward: a name, or module:function")
    trial.add_argument(
        "--response",
        required=True,
        action="append",
        help="text to score, - for standard input; with --group-rm once for each sample of the group",
    )
    trial.add_argument("--group-rm", action="store_true", help="TYPE is a group reward")
    trial.add_argument("--label", help="ground truth, as the reward wants it")
    trial.add_argument("--prompt", default="", help="prompt, for rewards that read it")
    trial.add_argument("--metadata", default="{}", metavar="JSON", help="metadata of the row")
    trial.add_argument("--rm-args", default="{}", metavar="JSON", help="options of the reward")
    trial.add_argument("--timeout-s", type=_seconds, default=30.0, help="deadline, seconds")
    trial.add_argument("--json", action="store_true", help="print JSON")
    return parser.parse_args(argv)
