"""The GPT model: layers, attention, MoE routers, MTP layers, LoRA adapters, log-probs."""
