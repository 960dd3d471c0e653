"""Sources of rows.

`base` (the `Rows` protocol), `checksums` (of files, for continued runs), `files` (JSONL, Parquet), `hf` (datasets),
`reasoning_gym` with `reasoning_gym_patches`, `shapes` (pictures made on demand).
"""
