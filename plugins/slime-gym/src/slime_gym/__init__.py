"""reasoning-gym tasks for slime, as data source and reward.

`section` has the settings, `problems` the distinct problems of a task and their held-out part, `source` the
data source over them, `reward` the score by the task's own scorer. Only `tasks` imports reasoning-gym.
"""
