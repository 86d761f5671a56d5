"""The transports: a module each, with both halves."""
