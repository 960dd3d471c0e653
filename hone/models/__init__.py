"""Hugging Face models: load or build them, their tokenizers, and attention over packed sequences.

Read `settings`, `source` (find the files), `loading` (read the weights), `tokenizer`; then `attention/`, `vision/`,
`routing` (experts of a token), `four_bit` (QLoRA) as needed.
"""
