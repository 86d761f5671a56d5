"""The reference system's import names, for files that were written for it: views of this slime, by slime-compat."""
