"""Real runs beside their simulation."""
