"""Adapters: functions with the reference system's signatures, called as ours are. `table` says which there are."""
