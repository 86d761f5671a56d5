"""Weight updates: staged on the servers' host or received by their ranks, checked, loaded and proven by the servers."""
