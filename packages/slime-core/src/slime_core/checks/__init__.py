"""Checks of settings before a run starts."""
