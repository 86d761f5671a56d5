"""Updates that every rank of every server receives itself: the group that they join, and both of its sides."""
