"""From scores to the numbers that are credited."""
