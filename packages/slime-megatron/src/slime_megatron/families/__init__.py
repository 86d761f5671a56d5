"""Layers of families of slime-models which `Architecture` does not say all of."""
