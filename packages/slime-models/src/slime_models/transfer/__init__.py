"""Sending weights from a trainer to an engine: what transports have in common, the manifest of an update, fingerprints."""
