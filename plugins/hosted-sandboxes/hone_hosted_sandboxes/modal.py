"""Sandboxes of Modal, by its Python package (https://modal.com/docs/sdk/py/latest/modal.Sandbox).

Modal documents its package and not the gRPC below it, so hone uses the package: Sandbox.create, exec,
filesystem.write_bytes and terminate. The package finds the credentials itself: `modal token new`, or MODAL_TOKEN_ID and
MODAL_TOKEN_SECRET.
"""

from __future__ import annotations

import asyncio
import math
import os
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import modal

from hone.sandboxes.base import Limits, SandboxLost, SandboxRefused
from hone_hosted_sandboxes.hosted import CREATE_S, GRACE_S, MOST_BYTES, REQUEST_S, Busy, Executed, HostedSandboxes

APP = "hone"
LIFE_S = 24 * 3600  # the longest that Modal allows; an idle sandbox ends long before
TOO_LATE = -1  # what `wait` returns for a command that Modal ended at its deadline
T = TypeVar("T")


class ModalSandboxes(HostedSandboxes):
    """Modal; `image` is an image of a registry, such as python:3.12."""

    def __init__(self, limits: Limits, url: str, image: str) -> None:
        """Raises SandboxRefused for a url."""
        if url:
            raise SandboxRefused(f"modal has no url: its package knows the address; remove {url!r}")
        super().__init__(Modal(image, limits), limits)

    @staticmethod
    def configured() -> str:
        """Return whether credentials are here, without asking the service."""
        known = os.environ.get("MODAL_TOKEN_ID") or Path.home().joinpath(".modal.toml").exists()
        return "credentials found; the service was not asked" if known else "no credentials: modal token new"


class Modal:
    """Makes machines of Modal (`hone_hosted_sandboxes.hosted.Service`)."""

    name = "modal"

    def __init__(self, image: str, limits: Limits) -> None:
        self._image = image
        self._network = limits.network

    async def create(self, seconds: float) -> ModalMachine:
        image = modal.Image.from_registry(self._image) if self._image else modal.Image.debian_slim()
        app = await _asked(modal.App.lookup.aio(APP, create_if_missing=True), REQUEST_S)
        made = modal.Sandbox.create.aio(
            app=app, image=image, timeout=LIFE_S, idle_timeout=math.ceil(seconds), block_network=not self._network
        )
        return ModalMachine(await _asked(made, CREATE_S))

    async def close(self) -> None:
        """Nothing: the package keeps its connections."""


class ModalMachine:
    """A sandbox of Modal (`hone_hosted_sandboxes.hosted.Machine`)."""

    def __init__(self, sandbox: Any) -> None:
        self._sandbox = sandbox

    async def write(self, path: str, content: bytes) -> None:
        await _asked(self._sandbox.filesystem.write_bytes.aio(content, path), REQUEST_S)

    async def execute(self, argv: Sequence[str], timeout_s: float) -> Executed:
        return await _asked(self._execute(argv, timeout_s), timeout_s + GRACE_S)

    async def _execute(self, argv: Sequence[str], timeout_s: float) -> Executed:
        process = await self._sandbox.exec.aio(*argv, timeout=math.ceil(timeout_s), text=False)
        try:
            output: bytes = await process.stdout.read.aio()
            status: int = await process.wait.aio()
        except modal.exception.ExecTimeoutError:
            return Executed(late=True)
        if len(output) > MOST_BYTES:
            raise SandboxLost(f"modal: an output of more than {MOST_BYTES:,} bytes")
        return Executed(output.decode("utf-8", "replace"), status, late=status == TOO_LATE)

    async def keep(self, seconds: float) -> None:
        """Nothing: a sandbox whose command runs is not idle."""

    async def remove(self) -> None:
        await _asked(self._sandbox.terminate.aio(), REQUEST_S)


async def _asked(answer: Awaitable[T], limit_s: float) -> T:
    """Return Modal's answer. Raises Busy or SandboxLost."""
    try:
        async with asyncio.timeout(limit_s):
            return await answer
    except modal.exception.ResourceExhaustedError as error:
        raise Busy(f"modal: {error}") from error
    except (modal.exception.Error, TimeoutError, OSError) as error:
        raise SandboxLost(f"modal: {type(error).__name__}: {error}") from error


__all__ = ["Modal", "ModalMachine", "ModalSandboxes"]
