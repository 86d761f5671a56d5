"""Checkpoints: what they hold, how they are written, and conversion to Hugging Face folders."""
