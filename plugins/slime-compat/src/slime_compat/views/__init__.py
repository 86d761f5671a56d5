"""Views: our samples and settings under the names that the reference system has for them."""
