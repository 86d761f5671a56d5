"""`slime bench step`: a whole step, and TRL's."""
