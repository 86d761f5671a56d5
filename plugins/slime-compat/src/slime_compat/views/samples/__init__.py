"""Samples as the reference system has them: where they come from, what they get, and what is said of many."""
