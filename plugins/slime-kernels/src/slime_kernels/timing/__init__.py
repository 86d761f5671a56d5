"""Timing on a device: which there are, how a call is measured, and times of PyTorch that are kept. Imports neither torch nor triton."""
