"""Checksums, locks, and strict reading of files."""
