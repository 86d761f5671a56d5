"""Decoders of families whose layers `Architecture` does not say all of."""
