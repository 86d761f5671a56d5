"""The decoder: its layers, weights and KV cache."""
