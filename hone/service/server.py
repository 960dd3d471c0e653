"""The process of a service: start it, listen, end it."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable

import uvicorn

from hone.processes.listening import LoopServer, Refusals, bounded
from hone.service.answers import Answers
from hone.service.app import ServiceApp
from hone.service.disk.keys import add_key
from hone.service.disk.registry import Key
from hone.service.service import Service
from hone.service.settings import ServeConfig

MOST_CONNECTIONS = 4096
STOP_S = 5
FIRST_TENANT = "first"  # whose key is made and shown when a folder has none

Said = Callable[[str], None]


def serve(config: ServeConfig, listener: socket.socket, say: Said, check: Callable[[], None] = lambda: None) -> None:
    """Serve on `listener`, and close it, until SIGINT or SIGTERM.

    `check` is called once everything is constructed, and may refuse settings. Raises ModelError, OSError, ConfigError
    or ValueError if it cannot start.
    """
    with listener:
        asyncio.run(_serve(config, listener, say, check))


async def _serve(config: ServeConfig, listener: socket.socket, say: Said, check: Callable[[], None]) -> None:
    listen = config.listen
    service = Service(config)
    try:
        await service.start()
        settings = _settings(config, service)
        check()
        if not service.registry.find(Key):
            say(f"key of the tenant {FIRST_TENANT!r}, shown once: {add_key(service.registry, FIRST_TENANT)}")
        scheme = "http" if listen.tls_key is None else "https"
        host = f"[{listen.host}]" if ":" in listen.host else listen.host
        say(f"serving {service.shared.base_name} at {scheme}://{host}:{listener.getsockname()[1]}")
        await _listen(settings, service, listener)
    finally:
        await service.stop()


def _settings(config: ServeConfig, service: Service) -> uvicorn.Config:
    listen = config.listen
    return uvicorn.Config(
        Answers(ServiceApp(service).app, service),
        lifespan="off",
        ws="none",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=STOP_S,
        ssl_certfile=listen.tls_certificate,
        ssl_keyfile=listen.tls_key,
        proxy_headers=listen.behind_proxy,  # addresses of exported files begin with the proxy's scheme
        forwarded_allow_ips="*",
        http=bounded(Refusals("hone serve"), lambda: MOST_CONNECTIONS, head_s=120.0),
    )


async def _listen(settings: uvicorn.Config, service: Service, listener: socket.socket) -> None:
    server = LoopServer(settings)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.end)
    service.on_failure(server.end)
    await server.serve([listener])
    if (error := service.failed()) is not None:
        raise error
