"""Material of the suites of rollout engines: two models of one shape, prompts, and transformers' log-probs.

An engine is made once for all checks of a class, on one event loop, as in a run. Each check begins with the first
model's weights, awake and not paused.
"""

from __future__ import annotations

import asyncio
import copy
import secrets
import tempfile
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from hone.models.files.progress_bars import without_progress_bars
from hone.models.settings import BuildConfig
from hone.platforms.base import current_platform
from hone.rollout.base import Generating
from hone.testing.contract import Broken, Contract, require
from hone.testing.training import SIZES, save_model
from hone.types import Completion, GenerationRequest, SamplingParams

T = TypeVar("T")
CONTEXT = 512  # tokens of the model's context
SHORT = 12
VOCABULARY = 104


class Serving(Contract):
    """An engine that all checks of a class ask; subclasses know how it is made and how weights reach it."""

    model: ClassVar[Mapping[str, Any]] = {}  # what differs from the sizes of the model that is served
    tolerance: ClassVar[float] = 1e-4  # of log-probs against transformers
    long_tokens: ClassVar[int] = 240  # of an answer during which something happens: it must take longer than that
    seeds_positions: ClassVar[bool] = True  # whether a seed decides the tokens, alone or beside other requests

    _shared: ClassVar[Shared | None] = None

    @classmethod
    def teardown_class(cls) -> None:
        shared, cls._shared = cls.__dict__.get("_shared"), None
        if shared is not None:
            shared.close()

    def setup_method(self) -> None:
        super().setup_method()
        cls = type(self)
        self.shared: Shared = cls.__dict__.get("_shared") or Shared(self)
        cls._shared = self.shared
        self.engine = self.shared.engine
        self.wait(self._as_new())

    def wait(self, work: Awaitable[T]) -> T:
        """Run a coroutine on the event loop that the engine belongs to. Raises TimeoutError after `deadline_s`."""
        return self.shared.run(work, self.deadline_s)

    # --------------------------------------------------------------------------------------- what a subclass knows

    def device(self) -> torch.device:
        """Return the device of the weights that are sent: by default that of this process's platform."""
        return current_platform().torch_device(0)

    async def started(self, shared: Shared) -> Generating:
        """Return an engine of `shared.folder`, ready to get weights."""
        raise NotImplementedError

    async def update(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Have the engine serve these weights."""
        raise NotImplementedError

    async def let_some_come(self) -> None:
        """Return when the requests that were just sent have a few tokens, and not all."""
        raise NotImplementedError

    async def ended(self, engine: Any) -> None:
        """Free the engine."""

    # ------------------------------------------------------------------------------------------------- how they run

    async def _as_new(self) -> None:
        await self.engine.abort_all()
        await self.engine.wake_up()
        await self.engine.resume()
        await self.update(self.shared.weights(self.shared.first), 0)
        self.engine.metrics()

    async def _generate(self, name: str, prompt: tuple[int, ...], sampling: SamplingParams) -> Completion:
        found: Completion = await self.engine.generate(GenerationRequest(name, prompt, sampling))
        return found

    async def _asked(
        self, prompts: Sequence[tuple[int, ...]], tag: str = "r", seeds: Sequence[int] = (), **sampling: Any
    ) -> list[Completion]:
        """Every prompt at once; request i has seed i, or seeds[i]."""
        wanted = {"max_tokens": SHORT, "ignore_eos": True, **sampling}
        numbers = list(seeds) or list(range(len(prompts)))
        asked = [
            self._generate(f"{tag}{i}", prompt, SamplingParams(**{"seed": seed, **wanted}))
            for i, (prompt, seed) in enumerate(zip(prompts, numbers, strict=True))
        ]
        return list(await asyncio.gather(*asked))

    def _all(self, prompts: Sequence[tuple[int, ...]], seeds: Sequence[int] = (), **sampling: Any) -> list[Completion]:
        return self.wait(self._asked(prompts, seeds=seeds, **sampling))

    def _during(self, prompts: Sequence[tuple[int, ...]], action: Callable[[], Awaitable[None]]) -> list[Completion]:
        """Start long greedy answers, let some tokens come, do something, and wait for the answers."""

        async def play() -> list[Completion]:
            running = asyncio.create_task(self._asked(prompts, max_tokens=self.long_tokens, temperature=0.0))
            coming = asyncio.create_task(self.let_some_come())
            await asyncio.wait((running, coming), return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                coming.cancel()
                raise Broken(
                    f"answers of {self.long_tokens} tokens had ended before anything could happen: long_tokens"
                )
            await coming
            await action()
            return await running

        return self.wait(play())

    async def _must_refuse(self, when: str) -> None:
        try:
            await self._generate("refused", self._prompts(2)[1], SamplingParams(max_tokens=2))
        except RuntimeError:
            return
        raise Broken(f"{when}, a request was served")

    def _prompts(self, number: int) -> list[tuple[int, ...]]:
        """Prompts of 2 to 24 tokens, the same each time."""
        draw = torch.Generator().manual_seed(0)
        lengths = [2, 24, *torch.randint(2, 25, (max(number - 2, 0),), generator=draw).tolist()][:number]
        return [tuple(torch.randint(8, VOCABULARY, (n,), generator=draw).tolist()) for n in lengths]

    def _forward(self, model: Any, ids: Iterable[int]) -> Tensor:
        with torch.no_grad():
            logits: Tensor = model(torch.tensor([list(ids)]), use_cache=False).logits[0].float()
        return logits

    def _check_logprobs(self, model: Any, prompt: Sequence[int], found: Completion, begin: int = 0) -> None:
        logits = self._forward(model, (*prompt, *found.token_ids))[len(prompt) - 1 : -1].log_softmax(-1)
        wanted = logits.gather(1, torch.tensor(found.token_ids)[:, None])[:, 0]
        self._within(torch.tensor(found.logprobs)[begin:], wanted[begin:], "log-probs")

    def _check_versions(self, found: Sequence[Completion], versions: set[int]) -> None:
        seen = {version for one in found for version in one.weight_versions}
        require(seen == versions, f"tokens have weight versions {sorted(seen)}, expected {sorted(versions)}")

    def _within(self, found: Tensor, wanted: Tensor, what: str) -> None:
        gap = float((found.double() - wanted.double()).abs().max())
        self.figures["error"] = max(self.figures.get("error", 0.0), float(f"{gap:.2g}"))
        require(gap <= self.tolerance, f"{what}: the largest difference is {gap:.3g}, allowed are {self.tolerance:g}")


class Shared:
    """Parts that the checks of one class share: an event loop, two models of one shape, and the engine."""

    def __init__(self, suite: Serving) -> None:
        self._suite = suite
        self._temporary = tempfile.TemporaryDirectory(prefix="hone-contract-")
        self.folder, self.logs = Path(self._temporary.name, "model"), Path(self._temporary.name)
        save_model(BuildConfig(**{**SIZES, "layers": 2, "max_positions": CONTEXT, **suite.model}), self.folder)
        self.token = secrets.token_hex(16)
        with without_progress_bars():
            self.first = AutoModelForCausalLM.from_pretrained(self.folder, attn_implementation="eager").eval()
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
        self.second = copy.deepcopy(self.first)
        with torch.no_grad():
            generator = torch.Generator().manual_seed(1)
            for weight in self.second.parameters():
                weight.add_(torch.randn(weight.shape, generator=generator) * 0.1)
        self._runner = asyncio.Runner()
        self.engine: Any = None
        try:
            self.engine = self._runner.run(suite.started(self))
        except BaseException:
            self.close()
            raise

    def weights(self, model: Any) -> dict[str, Tensor]:
        """The weights of a model by name, where the suite says that they are sent from."""
        return {name: weight.to(self._suite.device()) for name, weight in model.state_dict().items()}

    def run(self, work: Awaitable[T], deadline_s: float) -> T:
        async def within() -> T:
            async with asyncio.timeout(deadline_s):
                return await work

        return self._runner.run(within())

    def close(self) -> None:
        if self.engine is not None:
            self._runner.run(self._suite.ended(self.engine))
        self._runner.close()
        self._temporary.cleanup()


__all__ = ["CONTEXT", "SHORT", "VOCABULARY", "Serving", "Shared"]
