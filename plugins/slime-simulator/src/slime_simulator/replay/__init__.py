"""Replaying a recorded run: the decisions of its dispatcher, made again from what it recorded of everything else."""
