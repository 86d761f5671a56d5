"""Rewards for questions with options: which option a response decides for."""
