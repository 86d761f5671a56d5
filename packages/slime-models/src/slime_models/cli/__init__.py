"""The command `slime models`."""
