"""Trees of samples that begin alike: what is shared is forwarded once."""
