"""A run: its parts put together, its moves, evaluation and saving."""
