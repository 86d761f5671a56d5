"""Rewards that were written for other frameworks, as they are."""
