"""Weights of few bits, as engines serve them: how they are made of a trainer's, and which tensors they are."""
