"""What a decoder's layers are made of: attention, MLP, norms, and what builds them."""
