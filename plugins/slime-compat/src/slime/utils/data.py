"""Data files as samples."""

from slime_compat.views.dataset import Dataset, read_file

__all__ = ["Dataset", "read_file"]
