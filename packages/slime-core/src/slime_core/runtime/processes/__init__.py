"""Processes that a run starts: command lines, servers, what ends them with it, and their TCP ports."""
