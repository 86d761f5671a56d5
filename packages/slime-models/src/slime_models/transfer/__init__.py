"""Sending weights from a trainer to an engine: one module a transport, the manifest of an update, fingerprints."""
