"""Model families for slime: one table of rules between Hugging Face and Megatron weights."""
