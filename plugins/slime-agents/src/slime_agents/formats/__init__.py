"""How models write tool calls: JSON between tags (Hermes, Qwen), XML (GLM), functions in XML (Qwen3-Coder), and Llama's."""
