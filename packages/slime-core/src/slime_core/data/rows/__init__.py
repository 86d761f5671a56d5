"""Rows of a data set: files and Hugging Face data sets by their names, each row read when it is asked for."""
