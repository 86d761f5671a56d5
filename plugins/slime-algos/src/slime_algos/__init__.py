"""Advantages, losses and KL for slime, as pure functions over tensors."""
