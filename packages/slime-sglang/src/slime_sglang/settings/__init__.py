"""Settings of engines and servers. Nothing here imports sglang, and only `model_family` torch."""
