"""Processes in which problems and candidates run: forks of one that has imported torch and Triton, each in a sandbox of its own.

`zygote`, and all that it imports, runs there; `fork_server` is what the rest of slime asks.
"""
