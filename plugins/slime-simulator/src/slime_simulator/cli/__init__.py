"""The commands `slime simulate` and `slime plan`."""
