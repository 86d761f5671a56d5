"""Write the names of Megatron's flags, and which of its configurations each reaches, beside slime_megatron.settings.megatron_flags.

Run after raising megatron-core: `uv run python scripts/megatron_flags.py`.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from slime_megatron import compat
from slime_megatron.settings.megatron_flags import FIELDS, megatron_parser

TARGET = Path(__file__).parents[1] / "packages/slime-megatron/src/slime_megatron/settings/megatron_flags.json"


def flags() -> dict[str, list[str]]:
    """Return flag, dashes as underscores -> configurations that have its field."""
    compat.install()
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer.transformer_config import TransformerConfig

    configs = {
        "transformer": TransformerConfig,
        "optimizer": OptimizerConfig,
        "ddp": DistributedDataParallelConfig,
    }
    fields = {name: {f.name for f in dataclasses.fields(config)} for name, config in configs.items()}
    return {
        option.removeprefix("--").replace("-", "_"): [
            name for name in configs if FIELDS.get(action.dest, action.dest) in fields[name]
        ]
        for action in megatron_parser()._actions
        for option in action.option_strings
        if option.startswith("--")
    }


def rendered() -> str:
    """Return the file's text: a flag a line."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(reach)}" for name, reach in sorted(flags().items()))
    return "{\n" + lines + "\n}\n"


if __name__ == "__main__":
    TARGET.write_text(rendered())
