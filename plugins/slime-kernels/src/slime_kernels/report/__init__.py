"""The report on a run: what became of its kernels. Imports neither torch nor triton."""
