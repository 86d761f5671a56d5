"""Settings of the trainer, and their checks. Imports neither torch nor megatron."""
