"""Rewards that compare texts, and what all rewards read of a response."""
