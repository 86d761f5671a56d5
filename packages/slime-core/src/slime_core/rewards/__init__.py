"""Scoring: rewards in killable processes, and the transforms from scores to credited numbers."""
