"""One rank of the trainer: policy, critic, and metrics."""
