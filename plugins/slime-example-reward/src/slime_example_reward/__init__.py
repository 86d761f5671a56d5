"""The smallest reward plugin."""
