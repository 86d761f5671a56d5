"""The reward `code`: programs of a response, and the sandbox that runs them."""
