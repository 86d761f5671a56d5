"""Turns: a policy tries, is told what became of it, and tries again. Imports neither torch nor triton."""
