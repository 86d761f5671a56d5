"""Decorators that give every estimator and every loss their common options."""
