"""How models write tool calls: JSON between tags (Hermes, Qwen), XML (GLM), and Llama's."""
