"""HTTP calls to one server: deadlines, retries, concurrency and the API key."""
