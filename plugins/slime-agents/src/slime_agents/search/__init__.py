"""Search in the manner of Search-R1: the policy asks, passages are put into its response, and are not trained on."""
