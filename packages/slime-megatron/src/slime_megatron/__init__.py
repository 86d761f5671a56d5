"""The Megatron trainer for slime: megatron-core on CUDA, and on a machine without a GPU."""
