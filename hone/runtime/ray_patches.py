"""Patches on Ray. They import its modules by name, so that only `ray.py` imports Ray."""

from __future__ import annotations

import importlib
import os
import secrets
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

LOOPBACK = "127.0.0.1"
TOKEN, MODE = "RAY_AUTH_TOKEN", "RAY_AUTH_MODE"  # environment variables


@contextmanager
def on_loopback() -> Iterator[None]:
    """Within the block, `ray.init(_node_ip_address="127.0.0.1")` starts a cluster that listens only on loopback.

    Ray's servers bind to loopback if that is the node's address, but `ray.init` first replaces it with an address that
    other machines can reach, and then all its processes listen on all interfaces.
    https://github.com/ray-project/ray/blob/ray-2.60.0/python/ray/_private/services.py (`resolve_ip_for_localhost`)
    """
    services: Any = importlib.import_module("ray._private.services")
    original = services.resolve_ip_for_localhost
    services.resolve_ip_for_localhost = lambda host: LOOPBACK if host == LOOPBACK else original(host)
    try:
        yield
    finally:
        services.resolve_ip_for_localhost = original


@contextmanager
def kept_sigterm() -> Iterator[None]:
    """Keep the process's handler of SIGTERM, which `ray.init` replaces by one that calls `sys.exit(15)`.

    https://github.com/ray-project/ray/blob/ray-2.60.0/python/ray/_private/worker.py (`init`, `sigterm_handler`)
    """
    utils: Any = importlib.import_module("ray._private.utils")
    original, previous = utils.set_sigterm_handler, signal.getsignal(signal.SIGTERM)
    utils.set_sigterm_handler = lambda handler: None  # also while Ray starts, which takes seconds
    try:
        yield
    finally:
        utils.set_sigterm_handler = original
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, previous)  # Ray's C++ part has a handler of its own, which aborts


@contextmanager
def own_token() -> Iterator[None]:
    """Within the block, `ray.init` starts a cluster with a new token that only its processes know.

    Else Ray writes one token for all clusters of the user into `~/.ray/auth_token`, which every user can read.
    A token or a mode that the user has chosen is kept.
    https://github.com/ray-project/ray/blob/ray-2.60.0/python/ray/_private/authentication/authentication_token_setup.py
    """
    forget_token()
    chosen = any(name in os.environ for name in (TOKEN, f"{TOKEN}_PATH")) or os.environ.get(MODE) == "disabled"
    if not chosen:
        os.environ[TOKEN] = secrets.token_hex(32)
    try:
        yield
    finally:
        if not chosen:
            del os.environ[TOKEN]


def forget_token() -> None:
    """Read the token anew when the next cluster is joined."""
    importlib.import_module("ray._raylet").AuthenticationTokenLoader.instance().reset_cache()


def end_failed_start(error: BaseException) -> None:
    """End the processes of the node whose start raised `error`: Ray leaves them running until this process ends.

    https://github.com/ray-project/ray/blob/ray-2.60.0/python/ray/_private/node.py (`Node.__init__`)
    """
    node: Any = importlib.import_module("ray._private.node")
    for frame, _ in traceback.walk_tb(error.__traceback__):
        started = frame.f_locals.get("self")
        if isinstance(started, node.Node):
            started.kill_all_processes(check_alive=False)
