"""Diagnosis of a run from the files in its folder (`hone diagnose`), or while it goes on.

    metrics.jsonl, config.yaml, run.json, failure.txt --`evidence`--> Evidence --`rules`--> Findings, worst first

`live` looks on during a run. `trends` has the statistics of a curve. `learning`, `machine` and `rollouts` have the
rules by subject.
"""
