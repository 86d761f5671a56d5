"""Weight updates: received by a transport, staged on the servers' host, checked, loaded and proven by the servers."""
