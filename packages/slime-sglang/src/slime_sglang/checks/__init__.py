"""What is wrong with the settings of a run before anything is started."""
