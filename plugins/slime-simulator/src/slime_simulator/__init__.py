"""Simulating runs of slime, and planning them: its loops and its dispatcher over cost models, in virtual time."""
