"""Write the names of the arguments of SGLang's server beside slime_sglang.settings.section.

Run after raising sglang: `uv run --group sglang python scripts/sglang_flags.py`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

TARGET = Path(__file__).parents[1] / "packages/slime-sglang/src/slime_sglang/settings/sglang_flags.json"


def flags() -> list[str]:
    """Return the names, dashes as underscores, in order."""
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser(add_help=False)
    ServerArgs.add_cli_args(parser)
    options = (option for action in parser._actions for option in action.option_strings)
    return sorted(
        {option.removeprefix("--").replace("-", "_") for option in options if option.startswith("--")}
    )


def rendered() -> str:
    """Return the file's text: a name a line."""
    return "[\n" + ",\n".join(map(json.dumps, flags())) + "\n]\n"


if __name__ == "__main__":
    TARGET.write_text(rendered())
