"""Coroutines from plain functions."""

from slime_compat.views.running.loop import run

__all__ = ["run"]
