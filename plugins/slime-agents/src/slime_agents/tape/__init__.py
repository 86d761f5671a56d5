"""The token tape of a session: every id that the policy sampled, once, at its place."""
