"""Terms that estimators and losses are made of: ratios, KL, corrections, whitening."""
