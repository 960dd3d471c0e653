"""Hugging Face models: load or build them, their tokenizers, and attention over packed sequences.

Read `settings`, `source` (find the files), `files/` (folders of GGUF files), `loading` (read the weights), `tokenizer`;
then as needed: `building` (random weights), `value_head`, `checkpoint_names` (the names in the files), `parts/` (boxes
of weights), `attention/`, `numerics/` (precision, products), `rotary` (positions), `vision/`, `routing` (experts of a
token), `adaptable` (layers for adapters), `dropout`, `quantised` (checkpoints) and `four_bit` (QLoRA),
`transformers_patches`, `errors`.
"""
