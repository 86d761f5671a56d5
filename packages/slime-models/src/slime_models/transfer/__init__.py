"""Weights on their way from a trainer to an engine: what both sides of a transport have to agree on."""
