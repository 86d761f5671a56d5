"""Gemma 3 (text) for slime: a model family from outside, with layers of its own."""
