"""What lies between the matrix products of a decoding step, compiled for this CPU by numba (optional)."""
