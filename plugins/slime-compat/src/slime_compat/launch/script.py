"""`Script`: the arguments of one of the reference system's launch scripts, as they stand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

#: The reference's programs -> the loop that each is.
PROGRAMS = {"train.py": "sync", "train_async.py": "one-step-off"}
#: Flag of this package that says that a command line is the reference's, or with `none` that it is not.
PRESET = "preset"
#: Name of the preset.
SLIME = "slime"
#: Flags of the reference that add to what they were given before.
_REPEATED = frozenset({"rollout_sample_hook_path"})
#: Flags that the reference's command line cannot do without, and that slime never needs.
_MODEL_ARGUMENTS = ("num_layers", "hidden_size")


@dataclass
class Script:
    """Flags of a command line: those that a translation has dealt with are taken out."""

    program: str
    """`train.py` or `train_async.py`."""
    recipes: list[str]
    """Recipes of slime before the flags."""
    flags: dict[str, list[str]] = field(default_factory=dict)
    """Flag (underscores) -> its words; of one that is given twice the last, as argparse has it, or all where the reference adds them up."""

    def take(self, name: str) -> list[str] | None:
        """Take a flag out; returns its words, None where it is not given."""
        return self.flags.pop(name, None)

    def value(self, name: str) -> str | None:
        """Return the one word of a flag; None where it is not given, or has none or several."""
        words = self.flags.get(name)
        return words[0] if words is not None and len(words) == 1 else None

    def has(self, name: str) -> bool:
        """Return whether a flag is given."""
        return name in self.flags

    def words(self) -> Iterator[str]:
        """Yield the flags that are left, as words."""
        for name, words in self.flags.items():
            yield "--" + name.replace("_", "-")
            yield from words


def read_script(words: Sequence[str]) -> Script | None:
    """Return a command line as the reference's script; None where it is slime's own.

    It is the reference's if it begins with its program (`train.py`, wherever that is), says `--preset slime`, or gives the arguments
    by which Megatron is told the model, and names no recipe.
    """
    first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    before, flags = list(words[:first]), _flags(words[first:])
    chosen = flags.pop(PRESET, None)
    program = PurePath(before[0]).name if before else ""
    if program in PROGRAMS and not before[0].endswith(".toml"):
        return Script(program, before[1:], flags)
    if chosen == [SLIME] or (
        chosen is None and not before and all(name in flags for name in _MODEL_ARGUMENTS)
    ):
        return Script("train.py", before, flags)
    return None


def _flags(words: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            key = name[2:].replace("-", "_")
            before = found.pop(key, [])
            current = [*(before if key in _REPEATED else []), *([value] if equals else [])]
            found[key] = current
        else:
            current.append(word)
    return found
