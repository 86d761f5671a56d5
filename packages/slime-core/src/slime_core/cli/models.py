"""`slime models`: what can be fetched by name, and fetching it."""

from __future__ import annotations

from slime_core.cli.arguments import wants_help
from slime_core.errors import ConfigError, Problem
from slime_core.plugins.registry import Registry
from slime_core.run.build import resolve_model

HELP = """usage: slime models [list | fetch NAME]

  list    model families that can be trained, and models that can be fetched by name
  fetch   make a local Hugging Face folder of a model, and print its path"""


def main(argv: list[str]) -> int:
    """Run the subcommand."""
    if wants_help(argv):
        print(HELP)
        return 0
    verb, *rest = argv or ["list"]
    registry = Registry.from_environment()
    if verb == "list" and not rest:
        print("families (model_type of config.json):")
        for plugin in registry.plugins("slime.models"):
            print(f"  {plugin.name:<18}{plugin.distribution} {plugin.version}")
        print("\nmodels that `slime models fetch` knows, and --hf-checkpoint takes by name:")
        for answer in registry.hooks.slime_list_models():
            for name, summary in answer:
                print(f"  {name:<18}{summary}")
        print("\nA local folder, or a name on the Hugging Face hub, works too.")
        return 0
    if verb == "fetch" and len(rest) == 1:
        print(resolve_model(rest[0], registry))
        return 0
    raise ConfigError([Problem("slime models", repr(" ".join(argv)), "list, or fetch NAME")])
