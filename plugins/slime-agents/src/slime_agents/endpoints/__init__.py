"""Endpoints that agent programs ask, and the generator `agent`, which runs such programs."""
