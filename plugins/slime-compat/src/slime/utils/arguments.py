"""The arguments of a command line."""

from slime_compat.launch.arguments import parse_args

__all__ = ["parse_args"]
