"""Rewards that were written for other frameworks (verl, TRL, verifiers), unchanged."""
