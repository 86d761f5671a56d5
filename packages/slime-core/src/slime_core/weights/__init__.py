"""Weight sync: sending the trainer's weights to the engine, and proving that they arrived."""
