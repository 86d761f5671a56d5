"""Finding and loading plugins."""
