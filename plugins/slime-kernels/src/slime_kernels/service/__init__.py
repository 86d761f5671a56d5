"""The evaluation service: HTTP with the kernel fork's request and answer, and its client."""
