"""Advantage estimators, one a file."""
