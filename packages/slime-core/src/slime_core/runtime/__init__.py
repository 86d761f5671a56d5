"""The process of a command: deadlines, signals, threads, and how it ends."""
