"""The trainer: ranks that are Ray actors."""
