"""What makes an actor's process one of the run's: its surroundings, its plugins, its errors and its end."""
