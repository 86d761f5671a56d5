"""One response: the requests that generate it, and their answers."""
