"""What an answer in mathematics says: its structure, and when two are the same."""
