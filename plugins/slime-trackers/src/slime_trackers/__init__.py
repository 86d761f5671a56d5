"""Trackers of other programs: Weights & Biases, TensorBoard."""
