"""Sampling: sessions of clients, each on the base or on one snapshot, and their requests.

    asample --Futures--> queue of its snapshot --turns between snapshots--> Machine.rollout --> SampleResponse

The built-in engine has one snapshot in its weights at a time, and a server some (`at_once`). A snapshot keeps its place
while it has requests, up to `TURN` samples if others wait; within it, tenants take turns.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Any

from hone.schedule.lanes import Shifts, Turns
from hone.service.disk.checkpoints import SAMPLING, Checkpoints
from hone.service.disk.registry import Key, SnapshotRow
from hone.service.futures import PROTOBUF, Outcome
from hone.service.protocol.messages import CreateSamplingSession, Sample
from hone.service.protocol.refusals import BadRequest, Busy, Gone, NotFound, Refused
from hone.service.protocol.wire import sampling_reply
from hone.service.scoring import answer
from hone.service.shared import Shared
from hone.types import Completion, GenerationRequest

LOG = logging.getLogger(__name__)
TURN = 1024  # samples of one snapshot while another one waits
AT_ONCE = 512  # samples that the rollout has at a time


@dataclass(frozen=True, slots=True)
class Job:
    """One request that waits or runs."""

    tenant: str
    snapshot: str  # name in the rollout; empty: the base
    samples: int
    work: Callable[[], Coroutine[Any, Any, None]]  # which keeps its errors to itself


class Sampling:
    """All sampling of the service. Its methods run on HTTP's event loop."""

    def __init__(self, shared: Shared, checkpoints: Checkpoints) -> None:
        self._shared, self._registry, self._futures = shared, shared.registry, shared.futures
        self._checkpoints, self._rollout = checkpoints, shared.machine.rollout
        self._queues: dict[str, dict[str, deque[Job]]] = {}  # snapshot -> tenant -> requests
        self._shifts = Shifts(self._rollout.at_once, TURN)  # of snapshots
        self._tenants = Turns()
        self._running: dict[asyncio.Task[None], Job] = {}
        self._samples = 0  # that run
        self._wake = asyncio.Event()

    # ------------------------------------------------------------------------------------------------- sessions

    def create(self, tenant: Key, message: CreateSamplingSession) -> str:
        """Open a sampling session; the same request again gives the same one. Returns its id."""
        session_id = f"{message.session_id}:sample:{message.sampling_session_seq_id}"
        known = self._registry.one(SnapshotRow, "id = ?", (session_id,))
        if known is None:
            row = self._target(tenant, message.base_model, message.model_path)
            self._registry.put(replace(row, id=session_id, session=message.session_id, created=time.time()))
        elif (known.path, known.folder, known.follows) != (message.model_path or "", "", ""):
            raise BadRequest(f"{session_id} was used for another request")
        return session_id

    def _target(self, tenant: Key, base_model: str | None, path: str | None) -> SnapshotRow:
        """The base or snapshot that a session samples from. Raises NotFound or BadRequest."""
        if path is None:
            if base_model is None:
                raise BadRequest("set base_model or model_path")
            self._shared.check_base(base_model)
            return SnapshotRow("", tenant.name, "", "", "", "", 0, "", 0.0, 0)
        self._shared.check_base(base_model)
        found = self._checkpoints.find(tenant.name, path, (SAMPLING,))
        return SnapshotRow("", tenant.name, "", path, "", found.digest, int(found.lora != "null"), "", 0.0, 0)

    def session(self, tenant: str, session_id: str) -> SnapshotRow:
        found = self._registry.one(SnapshotRow, "id = ? AND tenant = ?", (session_id, tenant))
        if found is None:
            raise NotFound(f"there is no sampling session {session_id!r:.200}")
        return found

    def end_session(self, session_id: str) -> None:
        """Drop the snapshots that only a session's clients could sample from."""
        for row in self._registry.find(SnapshotRow, "session = ?", (session_id,)):
            self._registry.remove(SnapshotRow, "id = ?", (row.id,))
            self.retire(row.folder)
            self._checkpoints.discard(row.folder)

    def retire(self, folder: str) -> None:
        """Let the rollout forget the snapshot in a folder."""
        self._shifts = self._shifts.without(folder)
        self._shared.machine.drop(folder)

    def _opened(self, row: SnapshotRow) -> str:
        """The name of a session's snapshot in the rollout, which serves it from now on; empty: the base."""
        if row.follows:
            newest = self._registry.one(SnapshotRow, "id = ?", (row.follows,))
            if newest is None:
                raise Gone("the model that this client follows has ended")
            row = newest
        if not row.path and not row.folder:
            return ""
        folder = row.folder or self._checkpoints.find(row.tenant, row.path, (SAMPLING,)).folder
        if not self._rollout.holds(folder):
            self._rollout.open(folder, self._checkpoints.snapshot_of(folder, row.digest, bool(row.adapter)))
        return folder

    def _newest(self, row: SnapshotRow, snapshot: str) -> str:
        """The snapshot that a client who follows a model samples from by now; `snapshot` for others."""
        with suppress(Refused):  # the model has ended
            return self._opened(row) if row.follows else snapshot
        return snapshot

    # ------------------------------------------------------------------------------------------------- requests

    def submit(self, tenant: Key, message: Sample) -> tuple[str, list[str]]:
        """Take a request; returns its id and an id for each sample. Raises Busy if too many of the tenant wait."""
        if message.sampling_session_id is not None:
            row = self.session(tenant.name, message.sampling_session_id)
            request_id = f"{row.id}:{message.seq_id}"
        else:
            row = self._target(tenant, message.base_model, message.model_path)
            request_id = f"request-{secrets.token_hex(12)}"
        if message.num_samples > (most := self._shared.config.limits.samples):
            raise BadRequest(f"num_samples = {message.num_samples}: at most {most} are served in one request")
        self._check_room(tenant.name)
        ids = [f"{request_id}:{number}" for number in range(message.num_samples)]
        snapshot = self._opened(row)
        text = message.model_dump_json().encode()
        self._shared.make_room(tenant.name, len(text))
        if self._futures.open(request_id, tenant.name, digest=sha256(text).hexdigest(), size=len(text)):
            self._ask(request_id, row, snapshot, message)
        return request_id, ids

    def _ask(self, request_id: str, row: SnapshotRow, snapshot: str, message: Sample) -> None:
        work = partial(self._answer, request_id, row, snapshot, message)
        self._queue(Job(row.tenant, snapshot, message.num_samples, work))

    def _queue(self, job: Job) -> None:
        self._queues.setdefault(job.snapshot, {}).setdefault(job.tenant, deque()).append(job)
        self._wake.set()

    def name_of(self, tenant: Key, base_model: str | None, path: str | None) -> str:
        """The name in the rollout of the base or of a tenant's snapshot, which is served from now on."""
        return self._opened(self._target(tenant, base_model, path))

    async def generate(self, tenant: str, snapshot: str, request: GenerationRequest) -> Completion:
        """One sample in its turn. Raises as the rollout does, and Busy."""
        self._check_room(tenant)
        found: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()

        async def work() -> None:
            if found.done():  # the caller has gone
                return
            try:
                own = replace(request, sampling=replace(request.sampling, cache_owner=tenant))
                completion = await self._shared.machine.sample(self._rollout.generate(own))
            except Exception as error:  # noqa: BLE001 (the caller's)
                if not found.done():
                    found.set_exception(error)
                return
            self._shared.quotas.spend(tenant, len(request.tokens) + len(completion.token_ids))
            if not found.done():
                found.set_result(completion)

        self._queue(Job(tenant, snapshot, 1, work))
        return await found

    def _check_room(self, tenant: str) -> None:
        """Raise Busy for a tenant with too many requests that wait, or without tokens."""
        if not self._shared.quotas.has_room(tenant):
            raise Busy(f"{tenant} has used its tokens of this minute")
        waiting = sum(len(jobs.get(tenant, ())) for jobs in self._queues.values())
        if waiting >= (most := self._shared.config.limits.sampling_requests):
            raise Busy(f"{tenant} has {most} sampling requests that wait already")

    async def run(self) -> None:
        """Give requests to the rollout in turns, until cancelled."""
        try:
            while True:
                job = self._next()
                if job is None:
                    self._wake.clear()
                    await self._wake.wait()
                    continue
                self._samples += job.samples
                task = asyncio.create_task(job.work(), name="sample")
                self._running[task] = job
                task.add_done_callback(self._ended)
        finally:
            for task in self._running:
                task.cancel()

    def _next(self) -> Job | None:
        """The request that may run now; None: none may."""
        if self._samples >= AT_ONCE:
            return None
        self._shifts, snapshot = self._shifts.pick(
            self._queues.keys(), {one.snapshot for one in self._running.values()}
        )
        if snapshot is None:
            return None
        jobs = self._queues[snapshot]
        self._tenants, tenant = self._tenants.pick([name for name, queue in jobs.items() if queue])
        assert tenant is not None
        job = jobs[tenant].popleft()
        if not any(jobs.values()):
            del self._queues[snapshot]
        self._shifts = self._shifts.count(snapshot, job.samples)
        return job

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._samples -= self._running.pop(task).samples
        self._wake.set()

    async def _answer(self, request_id: str, row: SnapshotRow, snapshot: str, message: Sample) -> None:
        try:
            if (newest := self._newest(row, snapshot)) != snapshot:  # newer weights came while it waited
                self._ask(request_id, row, newest, message)
                return
            answering = answer(self._rollout, snapshot, message, seed_of(message), request_id, row.tenant)
            found = await self._shared.machine.sample(answering)
            outcome = Outcome(sampling_reply(found), PROTOBUF)
            sampled = sum(len(one.tokens) for one in found.sequences)
            self._shared.quotas.spend(row.tenant, len(message.prompt.tokens) + sampled)
        except Exception as error:
            if (newest := self._newest(row, snapshot)) != snapshot:  # which took its place
                self._ask(request_id, row, newest, message)
                return
            if not isinstance(error, Refused | ValueError):
                LOG.exception("sampling request %s failed", request_id)
            outcome = Outcome.failed(error)
        self._futures.resolve(request_id, outcome)


def seed_of(message: Sample) -> int:
    """The seed of a request: the client's, or a random one."""
    given = message.sampling_params.seed
    return secrets.randbits(62) if given is None else given
