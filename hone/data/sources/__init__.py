"""Sources of rows.

`base` (the `Rows` protocol), `files` (JSONL, Parquet), `hf` (datasets), `reasoning_gym`, `shapes`.
"""
