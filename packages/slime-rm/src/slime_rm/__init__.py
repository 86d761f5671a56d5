"""Rewards for slime."""
