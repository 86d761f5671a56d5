"""Layers with a gated delta net in the place of attention."""
