"""What an engine holds: weights by Hugging Face name, and the caches of its requests."""
