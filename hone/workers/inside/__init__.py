"""Code that runs inside the processes of rollout servers.

`receiving` (receives weights; every server uses it), `builtin`, `vllm` with `vllm_patches`, `vllm_quantised` (layers
that it quantises), `vllm_server` (its start) and `vllm_follower` (its workers on further machines).
"""
