"""Quantised weights as engines serve them: formats, which tensors are quantised, and whole folders."""
