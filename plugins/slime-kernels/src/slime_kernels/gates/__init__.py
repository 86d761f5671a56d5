"""Gates that a candidate passes before anything of it runs: its source is read, and what of it is for a GPU is put for a CPU."""
