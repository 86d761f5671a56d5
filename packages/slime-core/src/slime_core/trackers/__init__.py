"""Where metrics go."""
