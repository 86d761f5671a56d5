"""`slime bench rewards`: the reward pool beside the grader called inline."""
