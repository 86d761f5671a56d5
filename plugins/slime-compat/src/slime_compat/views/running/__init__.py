"""What user functions reach of the run that they are in, and of the machine."""
