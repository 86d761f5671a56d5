"""`slime models`: families and what slime does with each, models by name, and the skeleton of a family of one's own."""

from __future__ import annotations

from slime_core.cli.arguments import wants_help
from slime_core.errors import ConfigError, Problem
from slime_core.plugins.registry import Registry

HELP = """usage: slime models [list | fetch NAME | support [FAMILY ...] | new NAME [--layers] [--into FOLDER]]

  list     model families that can be trained, and models that can be fetched by name
  fetch    make a local Hugging Face folder of a model, and print its path
  support  what has been shown for each family: training, conversion, engines, parallelism
  new      write the skeleton of a package with a model family of your own, NAME being model_type in config.json;
           --layers has it bring layers to the trainer, too"""


def main(argv: list[str]) -> int:
    """Run the subcommand. Entry point `models` of the group `slime.commands`."""
    if wants_help(argv):
        print(HELP)
        return 0
    verb, *rest = argv or ["list"]
    registry = Registry.from_environment()
    if verb == "list" and not rest:
        print(_listing(registry))
        return 0
    if verb == "fetch" and len(rest) == 1:
        from slime_core.run.build import resolve_model

        print(resolve_model(rest[0], registry))
        return 0
    if verb == "support":
        print(_support(registry, rest))
        return 0
    if verb == "new":
        from slime_models.cli.skeleton import new_family

        print(new_family(rest, registry))
        return 0
    raise ConfigError(
        [Problem("slime models", repr(" ".join(argv)), "list, fetch NAME, support [FAMILY ...], or new NAME")]
    )


def _listing(registry: Registry) -> str:
    lines = ["families (model_type of config.json):"]
    for plugin in registry.plugins("slime.models"):
        lines.append(f"  {plugin.name:<18}{plugin.distribution} {plugin.version}")
    lines.append("\nmodels that `slime models fetch` knows, and --hf-checkpoint takes by name:")
    lines += [
        f"  {name:<18}{summary}" for answer in registry.hooks.slime_list_models() for name, summary in answer
    ]
    return "\n".join([*lines, "\nA local folder, or a name on the Hugging Face hub, works too."])


def _support(registry: Registry, names: list[str]) -> str:
    from slime_models.family.support import FEATURES, table

    wanted = names or [plugin.name for plugin in registry.plugins("slime.models")]
    rows, notes = table([registry.resolve("slime.models", name) for name in wanted])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(word.ljust(width) for word, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    lines += ["", *(f"({number}) {note}" for number, note in enumerate(notes, 1))]
    lines += [
        "",
        "yes: proven by slime's tests; open: not tried; says: its package has no reason against it; empty: no such thing",
    ]
    return "\n".join(lines + [f"  {feature:<10}{meaning}" for feature, meaning in FEATURES.items()])
