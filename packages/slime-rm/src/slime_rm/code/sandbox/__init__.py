"""Running an untrusted Python program in Linux namespaces."""
