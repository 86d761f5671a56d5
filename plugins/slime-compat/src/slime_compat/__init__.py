"""Runs scripts, hooks and files written for the reference system and for verl."""
