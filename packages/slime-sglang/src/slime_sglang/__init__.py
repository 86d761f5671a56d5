"""SGLang for slime: the serving engine on CUDA, and on a machine without a GPU."""
