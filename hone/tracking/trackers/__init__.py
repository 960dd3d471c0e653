"""Trackers, one file for each.

`jsonl` (the record), `console` (the live display), `trace` (a timeline), `prometheus`, `opentelemetry`, `tensorboard`,
`wandb`, `mlflow`, `trackio`; `completions` (their tables); `background` runs one of them in its own thread.
"""
