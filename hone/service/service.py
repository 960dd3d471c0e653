"""The service: sessions, models, sampling and checkpoints of tenants, and the tasks that run them."""

from __future__ import annotations

import asyncio
import fcntl
import logging
import secrets
import time
from collections.abc import Callable
from typing import Any

from hone.config import ConfigError
from hone.full_disk import do_not_wait
from hone.service.commands import Commands
from hone.service.disk.checkpoints import Checkpoints
from hone.service.disk.keys import tenant_of
from hone.service.disk.registry import DISK_ERRORS, REGISTRY_FILE, Key, Registry, Session
from hone.service.futures import Futures
from hone.service.machine import Machine
from hone.service.models import Models
from hone.service.protocol import messages
from hone.service.protocol.refusals import Gone, NotFound, Refused
from hone.service.quotas import Quotas
from hone.service.sampling import Sampling
from hone.service.settings import ServeConfig
from hone.service.shared import Shared
from hone.service.training import Training

LOG = logging.getLogger(__name__)
LOCK = "service.lock"  # in the folder of a service
LOOK_S = 5.0  # between two looks at what has expired


class Service:
    """One service in one process."""

    def __init__(self, config: ServeConfig) -> None:
        self.config = config
        self.machine = Machine(config)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Load the model and take up what the folder has. Raises ModelError, OSError or ValueError.

        Raises ConfigError if another process serves the folder.
        """
        self.config.root.mkdir(parents=True, exist_ok=True)
        self._lock = (self.config.root / LOCK).open("a", encoding="utf-8")  # the kernel frees it with the process
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(
                f"folder: another process serves {self.config.root}; end it, or name another folder"
            ) from error
        await self.machine.start()
        do_not_wait()
        self.registry = registry = Registry(self.config.root / REGISTRY_FILE)
        self.futures = Futures(self.config.limits.result_s, self.config.limits.held_bytes)
        self.shared = Shared(self.config, self.machine, registry, self.futures, Quotas())
        LOG.info("clients may call the base model %s", ", ".join(self.shared.names))
        self.checkpoints = Checkpoints(self.shared)
        if orphans := self.checkpoints.remove_orphans():
            LOG.warning("removed %d unfinished checkpoints of a process that was killed", len(orphans))
        self.sampling = Sampling(self.shared, self.checkpoints)
        models = Models(self.shared, self.checkpoints)
        commands = Commands(self.shared, self.checkpoints, models, self.sampling.retire)
        self.training = Training(self.shared, self.checkpoints, models, commands)
        self.training.restore()
        self._seen: dict[str, float] = {}
        left = "SELECT session FROM models WHERE closed = 0 UNION SELECT session FROM snapshots"
        for one in registry.find(Session, f"ended != '' AND id IN ({left})"):
            self._end(one.id, one.ended)  # the process ended in between
        now = time.monotonic()
        self._seen = {one.id: now for one in registry.find(Session, "ended = ''")}
        self._tasks = [
            asyncio.create_task(work, name=name)
            for name, work in (
                ("training", self.training.run()),
                ("sampling", self.sampling.run()),
                ("expiry", self._expire()),
            )
        ]

    async def stop(self) -> None:
        """End the tasks; what clients were told is in the registry."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.machine.stop()
        self._lock.close()

    def on_failure(self, call: Callable[[], None]) -> None:
        """Call a function if a task ends, which none should: without it, clients would wait for ever."""
        for task in self._tasks:
            task.add_done_callback(lambda ended: None if ended.cancelled() else call())

    def failed(self) -> BaseException | None:
        """The error of a task that ended, which none should; None: they run."""
        ended = [task for task in self._tasks if task.done() and not task.cancelled()]
        return ended[0].exception() if ended else None

    def tenant(self, key: str) -> Key:
        """The tenant of a key. Raises Refused if it is not valid."""
        found = tenant_of(self.registry, key)
        if found is None:
            raise Refused("the key is not valid: hone serve key add NAME makes one", 401)
        self.shared.quotas.know(found)
        return found

    # ------------------------------------------------------------------------------------------------- sessions

    def create_session(self, tenant: Key, message: messages.CreateSession) -> dict[str, Any]:
        session_id = f"session-{secrets.token_hex(16)}"
        facts = message.model_dump_json(exclude={"type"})
        self.registry.put(Session(session_id, tenant.name, time.time(), facts, ""))
        self._seen[session_id] = time.monotonic()
        alpha = self.config.training.lora_alpha
        return {
            "type": "create_session",
            "session_id": session_id,
            "info_message": f"hone serve: adapters have alpha {alpha:g}, and none on the unembedding",
        }

    def any_session(self, tenant: Key, session_id: str) -> Session:
        """A tenant's session, also if it has ended. Raises NotFound."""
        found = self.registry.one(Session, "id = ? AND tenant = ?", (session_id, tenant.name))
        if found is None:
            raise NotFound(f"there is no session {session_id!r:.200}")
        return found

    def session(self, tenant: Key, session_id: str) -> Session:
        """A tenant's session that goes on. Raises NotFound, or Gone if it has ended."""
        found = self.any_session(tenant, session_id)
        if found.ended:
            raise Gone(f"the session has ended: {found.ended}")
        return found

    def heartbeat(self, tenant: Key, session_id: str) -> None:
        self._seen[self.session(tenant, session_id).id] = time.monotonic()

    async def finish(self, tenant: Key, session_id: str, why: str) -> None:
        """End a session: its models and its own snapshots go, its checkpoints stay. Again is fine."""
        if not self.any_session(tenant, session_id).ended:
            self._end(session_id, why)

    def _end(self, session_id: str, why: str) -> None:
        self.registry.change(Session, "ended = ?", "id = ?", (why, session_id))
        self._seen.pop(session_id, None)
        self.training.end_session(session_id, why)
        self.sampling.end_session(session_id)

    async def _expire(self) -> None:
        """Look at what has expired, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            limit = time.monotonic() - self.config.limits.session_s
            try:
                for session_id in [name for name, seen in self._seen.items() if seen < limit]:
                    self._end(session_id, f"no heartbeat came for {self.config.limits.session_s:g} s")
                self.training.give_up_gaps()
                self.futures.forget_old()
                self.training.forget_old()
                for folder in self.checkpoints.sweep():
                    self.sampling.retire(folder)
            except DISK_ERRORS:
                LOG.exception("what has expired stays until the disk has room")
