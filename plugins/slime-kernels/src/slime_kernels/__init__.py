"""Kernel generation: multi-turn RL for Triton kernels."""
