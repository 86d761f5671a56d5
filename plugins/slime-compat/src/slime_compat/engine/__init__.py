"""The run's engine as an SGLang server and a tokenizer of transformers, which is what functions written there talk to."""
