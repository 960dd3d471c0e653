"""Run files from scripts and settings of verl.

    bash script or composed YAML --> entry point and options --> a reader for each subject --> Migration

`command` finds the start of a trainer and its options. `reader` calls the readers of the subjects: `batch`, `data`,
`algorithm`, `engine`, `rollout`, `extras`, and `sft` for supervised runs. `dropped` lists what hone does not need.

Checked against verl at commit 1dda039 (2026-08-22, after 0.9.0) and its default settings.
"""
