"""Agents: tools, environments and unmodified agent programs, trained token for token."""
