"""Rewards for mathematics: where a response's answer is, and whether it is the label."""
