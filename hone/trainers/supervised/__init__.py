"""SFT, preferences and reward models.

In reading order: `settings`, `trainer`, `assembly`, `reference`, `budget` (rows that are too long), and the tasks
`preference` and `reward_tasks`.
"""
