"""Model families: architecture, and the rules between Hugging Face and Megatron weights."""
