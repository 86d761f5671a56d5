"""The model families of this package, one a module."""
