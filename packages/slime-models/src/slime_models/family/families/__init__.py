"""The model families, a module each."""
