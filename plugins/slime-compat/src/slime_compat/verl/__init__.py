"""verl's configurations, and those of TRL and OpenRLHF, in words of slime."""
