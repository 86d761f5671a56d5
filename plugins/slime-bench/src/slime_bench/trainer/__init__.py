"""`slime bench trainer`: the trainer `megatron` beside transformers: speed, share of peak, padding, memory."""
