"""Run files from commands of OpenRLHF: `train_ppo_ray`, `train_sft`, `train_dpo`, `train_rm`.

`reader` maps the options of its trainers, and `names` has their names before 0.10.

Checked against OpenRLHF at commit 3c3be62 (2026-08-13, after 0.11.0).
"""
