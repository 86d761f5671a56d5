"""Scoring: rewards in worker processes, and transforms of their scores."""
