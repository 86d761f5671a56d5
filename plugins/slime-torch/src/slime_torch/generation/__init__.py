"""Requests: continuous batching, sampling, and weight updates between two steps."""
