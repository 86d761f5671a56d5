"""Kernels that pass over all bytes of weights: compiled by numba for host memory, by Triton for a GPU."""
