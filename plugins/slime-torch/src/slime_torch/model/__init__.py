"""The decoder: layers in a row, as a family describes them."""
