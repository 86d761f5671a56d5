"""The reference system's flags, and what becomes of each here."""
