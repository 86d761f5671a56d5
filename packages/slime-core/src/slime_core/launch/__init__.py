"""Launchers: where the processes of a run are started."""
