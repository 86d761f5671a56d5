"""The parts of a simulated run: engine, trainer, prompts and rewards that take virtual time and compute nothing."""
