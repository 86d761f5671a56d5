"""Generating the groups of a step."""
