"""`slime bench engine`: the engine `torch` beside transformers and the matrix products alone."""
