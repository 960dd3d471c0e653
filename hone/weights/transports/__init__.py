"""Transports of weights to another process: `ipc/`, `collective`, `disk` and `delta`; `bucketed/`: what they share."""
