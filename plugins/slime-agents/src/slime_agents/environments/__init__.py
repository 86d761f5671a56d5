"""Environments that exist elsewhere, for the generator `multi-turn`: adapters, and nothing of their own."""
