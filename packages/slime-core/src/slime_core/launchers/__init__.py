"""Where the processes of a run live."""
