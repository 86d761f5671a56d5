"""What a user's own losses, corrections and reducers call."""
