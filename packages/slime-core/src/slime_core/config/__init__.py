"""Settings: recipes, flags, where each value came from, and what is wrong with it."""
