"""The reference system's launch scripts: their arguments as slime's own settings."""
