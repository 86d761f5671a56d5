"""Tools: how calls are written and read, what answers them, and the generator `tool-loop`."""
