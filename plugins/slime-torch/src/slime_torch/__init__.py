"""Plain-PyTorch generation inside the training process, for slime."""
