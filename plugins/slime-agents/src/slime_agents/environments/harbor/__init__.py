"""Task folders of Harbor: the policy runs commands in a task's container, or in what takes its place; the task's tests score."""
