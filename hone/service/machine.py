"""The thread that computes: one event loop for the models in training and for the rollout.

    HTTP's loop --call(coroutine)--> this loop: one training command at a time | the rollout's steps between commands

Everything that touches tensors runs here, so nothing of an engine is shared between threads. A training command holds
the loop until it ends; sampling goes on between two of them. Requests to a server (`ServedRollout`) run on HTTP's loop,
so they go on during training commands.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar, TypeVarTuple

from hone.engines.settings import EngineConfig, LoraConfig
from hone.models.tokenizer import load_tokenizer
from hone.service.protocol.wire import training_reply
from hone.service.settings import ServeConfig
from hone.workers.tenants.sampling import SnapshotRollout
from hone.workers.tenants.served import ServedRollout
from hone.workers.tenants.shared_forward import SharedForward
from hone.workers.tenants.training import Base, TenantModel
from hone.workers.tenants.work import Work

R = TypeVar("R")
Ts = TypeVarTuple("Ts")
STOP_S = 10.0
SERVERS = "servers"  # logs, in the folder of a service


class Machine:
    """Base model, models in training and rollout. The coroutines may be awaited on any event loop."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="hone serve: compute", daemon=True)
        self.models: dict[str, TenantModel] = {}

    async def start(self) -> None:
        """Load the base model, and start a server that samples from it.

        Raises ModelError for a model that cannot be used, ConfigError and ServerFailed for a server that cannot start.
        """
        self._thread.start()
        await self.call(self._load)
        if isinstance(self.rollout, ServedRollout):
            await self.rollout.start()

    def _load(self) -> None:
        training, model = self._config.training, self._config.model
        engine = EngineConfig(
            compute_dtype=training.compute_dtype,
            max_tokens_per_microbatch=training.max_tokens_per_microbatch,
            activation_checkpointing=training.activation_checkpointing,
            logprob_chunk_tokens=training.logprob_chunk_tokens,
        )
        self.base = Base(model, engine)
        self._shared = SharedForward(self.base) if training.share_forwards else None
        self.tokenizer = load_tokenizer(model)
        self.rollout = self._rollout()

    def _rollout(self) -> SnapshotRollout | ServedRollout:
        model, settings, training = self._config.model, self._config.rollout, self._config.training
        if settings.backend == "builtin":
            return SnapshotRollout(model, settings.builtin, training.compute_dtype, self.tokenizer)
        logs = self._config.root / SERVERS
        return ServedRollout(model, settings, training.compute_dtype, training.max_lora_rank, logs)

    async def call(self, work: Callable[..., R], *arguments: Any) -> R:
        """Run a function on the thread."""

        async def run() -> R:
            return work(*arguments)

        return await self.run(run())

    async def of(self, model_id: str, verb: Callable[[TenantModel, *Ts], R], *arguments: *Ts) -> R:
        """Run a method of an open model on the thread."""
        return await self.call(lambda: verb(self.models[model_id], *arguments))

    async def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine on the thread's loop; a caller that is cancelled cancels it."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    async def sample(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Run a coroutine of the rollout: a server's on the loop that started it, the built-in engine's here."""
        return await (coroutine if isinstance(self.rollout, ServedRollout) else self.run(coroutine))

    def drop(self, name: str) -> None:
        """Let the rollout forget a snapshot."""
        if isinstance(self.rollout, ServedRollout):
            self.rollout.drop(name)
        else:
            self._loop.call_soon_threadsafe(self.rollout.drop, name)

    async def stop(self) -> None:
        rollout = getattr(self, "rollout", None)  # none if loading failed
        if isinstance(rollout, ServedRollout):
            await rollout.close()
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(STOP_S)
        if not self._loop.is_running():
            self._loop.close()

    # ------------------------------------------------------------------------------------- commands, on the thread

    def open(self, model_id: str, lora: LoraConfig | None) -> None:
        self.models[model_id] = self.base.open(lora)

    def train(self, model_id: str, work: Work) -> bytes:
        """Forward, or forward and backward; returns the reply."""
        model = self.models[model_id]
        if work.forward_only:
            work.loss(model.forward(work.batch, work.loss.needs), work.batch)
        else:
            model.forward_backward(work.batch, work.loss)
        return _reply(work)

    def train_together(self, works: Sequence[tuple[str, str, Work]]) -> list[bytes | None]:
        """Forward and backward of commands, of a tenant's model each, in one as far as losses allow; their replies.

        None: the model was closed meanwhile. A reply says how many of its tenant's models were in the forward.
        """
        assert self._shared is not None
        open_ = [(tenant, model_id, work) for tenant, model_id, work in works if model_id in self.models]
        self._shared.train([(self.models[model_id], work) for _, model_id, work in open_])
        own = Counter((tenant, work.loss.asks) for tenant, _, work in open_)
        return [
            _reply(work, own[tenant, work.loss.asks]) if model_id in self.models else None
            for tenant, model_id, work in works
        ]


def _reply(work: Work, models: int = 0) -> bytes:
    shared = {"models_in_forward:mean": models} if models else {}
    return training_reply(work.split(), {"loss:sum": work.loss.sum} | shared)
