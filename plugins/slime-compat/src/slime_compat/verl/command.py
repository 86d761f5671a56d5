"""`slime import-verl`: a configuration of verl becomes a recipe."""

from __future__ import annotations

import sys
from pathlib import Path

import tomli_w
from slime_core.errors import ConfigError, Problem

from slime_compat.verl.convert import Imported, imported
from slime_compat.verl.read import read_config

HELP = """usage: slime import-verl [CONFIG.yaml] [key=value ...] [--output RECIPE.toml]

Writes the recipe of a verl configuration: a YAML file of Hydra's, and overrides as verl's command line has them. Keys without a
counterpart are named on standard error, and in the recipe. The recipe goes to standard output unless --output names a new file.

  slime import-verl ppo_trainer.yaml algorithm.adv_estimator=grpo data.train_files=train.parquet --output grpo.toml
  slime check grpo.toml"""


def main(argv: list[str]) -> int:
    """Run the subcommand."""
    if not argv or "--help" in argv or "-h" in argv:
        print(HELP)
        return 0 if argv else 2
    words = list(argv)
    output = _output(words)
    if unknown := [word for word in words if word.startswith("--")]:
        raise ConfigError([Problem(word, "an unknown flag", "--output") for word in unknown])
    path = Path(words.pop(0)) if words and "=" not in words[0] and words[0][:1] not in "~+" else None
    recipe = imported(read_config(path, words))
    text = recipe_text(recipe, source=str(path or "overrides"))
    for note in recipe.notes:
        print(f"note: {note}", file=sys.stderr)
    for key, value in sorted(recipe.without.items()):
        print(f"no counterpart: {key} = {value}", file=sys.stderr)
    if output is None:
        print(text, end="")
    else:
        with output.open("x", encoding="utf-8") as file:
            file.write(text)
        print(output)
    return 0


def recipe_text(recipe: Imported, *, source: str) -> str:
    """Return the recipe as TOML, with what it lacks in comments."""
    lines = [f"# Made by `slime import-verl` of {source!a}.", *(f"# {note}" for note in recipe.notes)]
    if recipe.without:
        lines += ["# Keys without a counterpart:"]
        lines += [f"#   {key} = {value!a}" for key, value in sorted(recipe.without.items())]
    return "\n".join([*lines, "", tomli_w.dumps(recipe.tables)])


def _output(words: list[str]) -> Path | None:
    """Take `--output FILE` out of the words.

    Raises:
        ConfigError: it has no file, or one that is there.
    """
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name != "--output":
            continue
        value = value if equals else words[number + 1] if number + 1 < len(words) else ""
        del words[number : number + (1 if equals else 2)]
        if not value or Path(value).exists() or not Path(value).absolute().parent.is_dir():
            raise ConfigError(
                [Problem("--output", value or "nothing", "a new file, in a folder that is there")]
            )
        return Path(value)
    return None
