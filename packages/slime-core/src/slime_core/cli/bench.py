"""`slime bench`: benchmarks, each a plugin of the group `slime.benches`."""

from __future__ import annotations

from slime_core.plugins.registry import Registry


def main(argv: list[str]) -> int:
    """Run the subcommand."""
    registry = Registry.from_environment()
    if not argv or argv[0] in ("-h", "--help"):
        print(
            "usage: slime bench NAME [ARGUMENTS]\n\nEach measures ours and the alternative side by side in one run.\n"
        )
        for plugin in registry.plugins("slime.benches"):
            print(f"  {plugin.name:<14}{plugin.distribution} {plugin.version}")
        return 0
    bench = registry.resolve("slime.benches", argv[0])
    status: int = bench(argv[1:])
    return status
