"""Trackers, one file for each.

`jsonl` (the record), `console` (the live display), `memory` (peaks by phase), `trace` (a timeline), `prometheus`,
`opentelemetry`, `tensorboard`, `wandb`, `mlflow`, `trackio`; `completions` (their tables); `background` runs one
of them in its own thread.
"""
