"""SFT, preferences and reward models.

`trainer`, `assembly`, `settings`, `reference`, and the tasks `preference` and `reward_tasks`.
"""
