"""What generate functions and rollout functions call."""
