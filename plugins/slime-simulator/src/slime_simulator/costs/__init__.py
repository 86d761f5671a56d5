"""What a run costs: coefficients, how they are found, and how long its samples are."""
