"""Several agents over one prompt: roles that speak in turn, each with a sample and a reward of its own."""
