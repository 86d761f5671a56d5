"""Hugging Face folders: weights, tokenizer, processor, and how a folder is fetched."""
