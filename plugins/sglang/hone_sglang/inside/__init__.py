"""Code that runs inside SGLang's processes: `process` (start, HTTP paths, weight sync) and `adapters` (LoRA)."""
