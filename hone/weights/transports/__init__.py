"""Transports that send weights to another process: `ipc`, `collective`, `disk` and `delta`.

`ipc` and `collective` share `bucketed` (the sync), `buckets` (tensors in buckets), `channel` (control messages)
and `wire` (authentication). `memory` and `folders` manage shared memory and temporary folders. `by_rank` lets every
training rank send by `ipc`, `needs` says what each sends, and `rank_sender` is the rank's side of it.
"""
