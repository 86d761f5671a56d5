"""The `slime` command."""
