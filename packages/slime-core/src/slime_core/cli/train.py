"""`slime train`: run a recipe, or resume it."""

from __future__ import annotations

from slime_core.cli.arguments import split, wants_help

HELP = """usage: slime train RECIPE.toml [RECIPE.toml ...] [--flag value ...] [--set section.key=value ...]

Trains a model. Recipes are TOML files, later ones override earlier ones, flags override recipes.
Everything about the run lands in OUTPUT_DIR/RUN_NAME. The same command again resumes from its newest
checkpoint; --overwrite starts anew. The stages of a recipe, [stage.NAME], run one after the other, each
from the weights of the one before; --set stage.NAME.section.key=value sets a value of one of them.

  slime train recipes/quickstart.toml
  slime train recipes/quickstart.toml --num-rollout 20 --run-name short
  slime config flags              every flag, with its default
  slime check RECIPE.toml         find mistakes without starting anything"""


def main(argv: list[str]) -> int:
    """Run the subcommand."""
    if wants_help(argv):
        print(HELP)
        return 0
    recipes, flags = split(argv)
    n_flags = sum(word.startswith("--") for word in flags)
    print(f"slime train: reading {' '.join(recipes) or 'no recipe'}, {n_flags} flags", flush=True)
    from slime_core.cli.training import train  # takes a good part of a second to import

    return train(argv)
