"""Rollout engines that run as servers.

In reading order: `adapter` (what all servers share), `connection` (process and HTTP), `open_requests`, `builtin`;
`engine` (engines with a Python environment of their own), `vllm`, `vllm_kernels`, `vllm_images`, `vllm_snapshots`; the
machine that a server runs on: `host`, `relay`, and how many devices it needs: `shape`; servers that were started
elsewhere: `front` (their side), `attached`.
"""
