"""Environments for the generator `multi-turn`: a calculator and a guessing game."""
