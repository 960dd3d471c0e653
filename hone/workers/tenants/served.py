"""The rollout of a training service by a server with an environment of its own (vLLM).

    open(name, snapshot) --a request names it--> server.serve_adapter(folder) --digest equals the trainer's--> samples

The server has the base from the model's files, and the adapters of some snapshots beside it, which answer in one batch.
Another one takes the place of the one that was idle for longest. A server that was lost is started again with the next
request.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from hone.config import ConfigError
from hone.models.loading import empty_model, folder_of
from hone.models.settings import ModelConfig
from hone.platforms.base import compute_dtype, current_platform
from hone.registry import resolve
from hone.rollout import ROLLOUT_ENGINES
from hone.rollout.adapters import AdapterKind
from hone.rollout.base import ReplicaLost, ServerSpec
from hone.rollout.builtin.scoring import Following
from hone.rollout.settings import RolloutConfig
from hone.types import Completion, GenerationRequest, Scored
from hone.workers.tenants.sampling import WrongWeights
from hone.workers.tenants.training import Snapshot

MOST_LIKELY = 128  # tokens at each place whose log-probs the server returns
R = TypeVar("R")


class ServedRollout:
    """A `SnapshotRollout` in another process. All methods are called on one event loop."""

    def __init__(self, model: ModelConfig, settings: RolloutConfig, dtype: str, most_rank: int, logs: Path) -> None:
        """`dtype`: the trainer's compute dtype, or auto; `most_rank`: the largest rank of an adapter.

        Raises ConfigError for an engine that cannot, ModelError for a model that cannot be loaded.
        """
        engine = ROLLOUT_ENGINES.get(settings.backend)
        if not hasattr(engine, "snapshot_server"):
            raise ConfigError(f"rollout.backend={settings.backend} serves no snapshots; use builtin or vllm")
        if model.path is None:
            raise ConfigError(
                f"rollout.backend={settings.backend} reads the base from files, and model.build makes it here; set "
                "model.path to a folder, or rollout.backend=builtin"
            )
        skeleton: Any = empty_model(model, is_value_model=False)
        adapter = AdapterKind(most_rank, model=str(skeleton.config.model_type))
        if reason := engine.unfit_for_adapter(adapter):
            raise ConfigError(f"training.max_lora_rank={most_rank}: {reason}; lower it, or set rollout.backend=builtin")
        self.vocabulary = int(skeleton.config.get_text_config().vocab_size)
        self.architecture = str(skeleton.config.model_type)
        self.layers = frozenset(part for path, _ in skeleton.named_modules() for part in path.split("."))
        logs.mkdir(parents=True, exist_ok=True)
        options = {"max_logprobs": MOST_LIKELY, **settings.engine}
        spec = ServerSpec(
            settings=settings.model_copy(update={"engine": options}),
            model=str(folder_of(model)),
            dtype=compute_dtype(dtype, current_platform()),
            number=0,
            logs=logs,
            token=secrets.token_hex(32),
            trust_remote_code=model.trust_remote_code,
            context=model.used.context,
            frozen=True,
            adapter=adapter,
        )
        self._server: Any = resolve(engine.snapshot_server)(spec)
        self.at_once = self._server.places  # snapshots that it serves at a time
        if self.at_once < 1:
            raise ConfigError("rollout.engine.max_loras should be 2 or more: one place for adapters stays empty")
        self._snapshots: dict[str, Snapshot] = {}
        self._placed: dict[str, None] = {}  # snapshots that the server has, the last one used last
        self._users: Counter[str] = Counter()  # requests to the server, by snapshot; empty: the base
        self._lost = False  # the server has to be started again
        self._turn = asyncio.Lock()  # of a request that is about to be sent: they go in the order in which they came
        self._ended = asyncio.Event()  # a request has ended

    @property
    def longest(self) -> int:
        return int(self._server.longest) - 1  # it scores a sequence by sampling a token after it

    async def start(self) -> None:
        """Start the server. Raises ServerFailed with the last lines of its log."""
        await self._server.start()

    async def close(self) -> None:
        await self._server.close()

    def open(self, name: str, snapshot: Snapshot) -> None:
        """Serve a snapshot under a name, from now on; requests for one of all weights fail."""
        self._snapshots[name] = snapshot

    def drop(self, name: str) -> None:
        self._snapshots.pop(name, None)

    def holds(self, name: str) -> bool:
        return name in self._snapshots

    async def generate(self, request: GenerationRequest) -> Completion:
        """See `ServerAdapter.generate`; `sampling.adapter` is the name of a snapshot, empty: the base."""
        most = min(request.sampling.max_tokens, max(1, self.longest - len(request.tokens)))
        within = replace(request, sampling=replace(request.sampling, max_tokens=most))
        return await self._asked(request.sampling.adapter, lambda: self._server.generate(within))

    async def score(self, name: str, sequence: tuple[int, ...], top_k: int = 0) -> Following:
        """Log-probs at temperature 1 of each token under a snapshot (empty: the base), and the likeliest tokens.

        Raises ValueError for more of them than the server returns.
        """
        if top_k > MOST_LIKELY:
            raise ValueError(
                f"{self._server.name} returns the log-probs of {MOST_LIKELY} tokens at each place, and this needs "
                f"{top_k}: whole distributions are served with rollout.backend=builtin"
            )
        key = f"score-{secrets.token_hex(8)}"
        scored = await self._asked(name, lambda: self._server.score(key, sequence, top_k, name))
        return _tensors(scored, min(top_k, self.vocabulary))

    async def _asked(self, name: str, ask: Callable[[], Awaitable[R]]) -> R:
        """The answer to a request for a snapshot; asked once more if the server was lost on the way."""
        for again in (True, False):
            try:
                async with self._serving(name):
                    return await ask()
            except ReplicaLost:
                self._lost = True
                if not again:
                    raise
            except TimeoutError:
                self._lost = self._lost or not await self._answers()
                raise
        raise AssertionError("unreachable")

    async def _answers(self) -> bool:
        """Ask the server for a sign of life: with one, a late answer was late for its length."""
        try:
            await self._server.beat()
        except (ReplicaLost, TimeoutError):
            return False
        return True

    @asynccontextmanager
    async def _serving(self, name: str) -> AsyncIterator[None]:
        """Have the server serve a snapshot; one that has no place waits for it, and later requests wait behind it."""
        async with self._turn:
            if self._lost:
                await self._restart()
            if name:
                await self._place(name)
            self._users[name] += 1
        try:
            yield
        finally:
            self._users[name] -= 1
            self._users += Counter()  # without those that have none
            self._ended.set()

    async def _restart(self) -> None:
        await self._server.close()  # requests that run end now
        while self._users.total():
            await self._one_ends()
        await self._server.close()  # it may have been lost, or hang, since the last look
        await self._server.start()
        self._placed.clear()
        self._lost = False

    async def _one_ends(self) -> None:
        self._ended.clear()
        await self._ended.wait()

    async def _place(self, name: str) -> None:
        """Have a snapshot among those that the server has. Raises WrongWeights, or ValueError for an unknown one."""
        snapshot = self._snapshots.get(name)
        if snapshot is None:
            raise ValueError(f"the snapshot {name!r} is not served any more")
        if not snapshot.adapter:
            raise WrongWeights(f"{self._server.name} serves adapters, and this snapshot has all weights")
        if name in self._placed:
            self._placed[name] = self._placed.pop(name)
            return
        while len(self._placed) >= self.at_once:
            idle = next((one for one in self._placed if not self._users[one]), None)
            if idle is None:
                await self._one_ends()
            else:
                await self._told(self._server.drop_adapter(idle))
                del self._placed[idle]
        found = await self._told(self._server.serve_adapter(name, snapshot.folder))
        if found != snapshot.digest:
            await self._told(self._server.drop_adapter(name))
            raise WrongWeights(
                f"{self._server.name} read the digest {found} from the snapshot in {snapshot.folder.name}, and the "
                f"trainer wrote {snapshot.digest}: it is not served"
            )
        self._placed[name] = None

    async def _told(self, call: Awaitable[R]) -> R:
        """The answer of the server to a change of its adapters. Without one, nobody knows what it has."""
        try:
            return await call
        except (asyncio.CancelledError, TimeoutError):
            self._lost = True
            raise


def _tensors(scored: Scored, width: int) -> Following:
    first = (0,) * width  # nothing precedes the first token
    ids, likely = ([one or first for one in found] for found in (scored.top_ids, scored.top_logprobs))
    shape = len(scored.logprobs), width
    return Following(
        torch.tensor(scored.logprobs),
        torch.tensor(ids, dtype=torch.int64).view(shape),
        torch.tensor(likely, dtype=torch.float32).view(shape),
    )


__all__ = ["MOST_LIKELY", "ServedRollout"]
