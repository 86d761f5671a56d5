"""Data sources and the buffer, and laying out finished groups as a batch for the trainer."""
