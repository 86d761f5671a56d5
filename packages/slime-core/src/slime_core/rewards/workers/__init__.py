"""The processes that rewards run in."""
