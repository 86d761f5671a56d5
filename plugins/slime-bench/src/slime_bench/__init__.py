"""Benchmarks of whole steps for slime, with peers beside it in the same run."""
