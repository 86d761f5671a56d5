"""SGLang for slime: servers on CUDA, and on a machine without a GPU."""
