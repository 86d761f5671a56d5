"""Commands that read the folder of a run."""
