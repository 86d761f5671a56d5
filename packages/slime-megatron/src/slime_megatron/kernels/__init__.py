"""What the trainer computes on a GPU between its matrix products, by kernels of Triton that read and write each tensor once."""
