"""Filters of groups."""
