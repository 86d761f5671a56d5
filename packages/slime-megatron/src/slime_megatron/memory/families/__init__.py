"""What the layers of families keep for the backward pass: a module each with a `MEMORY`, which imports no torch."""
