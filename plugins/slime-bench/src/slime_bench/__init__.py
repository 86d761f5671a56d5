"""Benchmarks of slime beside alternatives, in the same run on the same machine."""
