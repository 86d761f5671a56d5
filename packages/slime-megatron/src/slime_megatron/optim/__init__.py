"""Optimizer steps, and weight sets that are swapped into one model."""
