"""Process groups, context parallelism, and how ranks split tokens."""
