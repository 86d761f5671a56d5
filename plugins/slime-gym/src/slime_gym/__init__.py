"""reasoning-gym tasks for slime, as data source and reward."""
