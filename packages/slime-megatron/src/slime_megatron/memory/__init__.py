"""Memory of the trainer's ranks by arithmetic, before anything starts. Imports neither torch nor Megatron."""
