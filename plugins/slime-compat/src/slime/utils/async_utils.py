"""Coroutines from plain functions."""

from slime_compat.views.loop import run

__all__ = ["run"]
