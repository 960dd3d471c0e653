"""Code that runs inside the processes of rollout servers.

`receiving` (receives weights; every server uses it), `builtin`, `vllm` with `vllm_patches`, `sglang` with
`sglang_adapters`.
"""
