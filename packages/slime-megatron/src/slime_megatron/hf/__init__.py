"""Hugging Face weights: loading, sharding, exporting, and `--save-hf`."""
