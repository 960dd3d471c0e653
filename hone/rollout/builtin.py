"""The built-in rollout engine: continuous batching in the caller's process, on its event loop.

    generate() --queue--> [ driver task: refill, prefill, one token per row, hand out what is finished ] --> Completion
                                ^ runs while there is work; gives the loop back after every step
    update_weights / sleep / abort_all / pause: take effect between two steps

There is no thread and nothing waits on a clock: what happens depends only on the order of the calls. Every `generate`
waits for a future that the driver owns; if the driver fails or is cancelled, each of them gets the error.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from hone.models.digest import Method, digest_tensors
from hone.rollout.adapters import AdapterFiles, AdapterKind, MergedAdapter, check_adapter, unfit_for_merging
from hone.rollout.base import PauseMode, WeightReceipt
from hone.rollout.batching import Counters, PrefillPolicy, RunningBatch
from hone.rollout.cache import CacheLimits, KVCache, PackedPrompts
from hone.rollout.decoder import Decoder, build_decoder
from hone.rollout.requests import Request, StopStrings, check_prompt, check_sampling
from hone.rollout.scoring import in_turns
from hone.rollout.settings import BuiltinSettings
from hone.rollout.shown import place_images
from hone.types import Completion, Image, Metric, Metrics, SamplingParams, StopReason

WAKE_TAGS = ("weights", "kv_cache")


class BuiltinEngine:
    """A `RolloutEngine` with storage of its own for weights (of its own dtype) and KV cache.

    Built from a model, it serves a copy of that model's weights as version 0. Built from a config, it serves nothing
    (version -1) before the first `update_weights`.
    """

    returns_routes = True  # a completion can say which experts its tokens went to
    in_process = True  # constructed from a model or config; a server's adapter is, from a `ServerSpec`
    positional_seed = True

    def __init__(
        self,
        settings: BuiltinSettings,
        model: PreTrainedModel | PreTrainedConfig,
        tokenizer: Any = None,
        device: str | torch.device = "cpu",
        replica: str = "builtin-0",
        adapters: Mapping[str, AdapterFiles] | None = None,
    ) -> None:
        """`adapters` are served beside the policy, by name; requests for one wait until others have ended."""
        self.replica = replica
        self._config = model.config if isinstance(model, PreTrainedModel) else model
        self._device = torch.device(device)
        self._dtype = _dtype(settings.dtype, model)
        self._execution = settings.execution
        self._vocabulary = self._config.get_text_config().vocab_size
        self._eos = _eos_ids(model, tokenizer)
        self._tokenizer = tokenizer
        self._longest = _longest(settings, self._config)
        self._limits = CacheLimits(settings.slots, settings.kv_cache_tokens)
        self._policy = PrefillPolicy(settings.prefill_tokens, settings.share_prompts)
        self._stop_strings = lru_cache(maxsize=64)(lambda stop: StopStrings(stop, tokenizer))
        self._queue: deque[Request] = deque()
        self._later: deque[Request] | None = None  # what comes while `pause("wait")` lets the others end
        self._open: set[str] = set()  # ids of requests that wait or run
        self._driver: asyncio.Task[None] | None = None
        self._paused = False
        self._awake = set(WAKE_TAGS)
        self._version = -1
        self._not_serving = "it has no weights yet; send them with update_weights"
        self._has_base = False
        self._adapters = {name: (one.tensors(), one.config) for name, one in (adapters or {}).items()}
        self._own: tuple[Mapping[str, Tensor], Mapping[str, Any]] | None = None  # the policy's adapter, if it has one
        self._merged = ""  # whose weights are served now: an adapter's name; empty: the policy's
        self._busy_s = 0.0
        self._ended: dict[StopReason, int] = dict.fromkeys(StopReason, 0)
        self._build()
        if isinstance(model, PreTrainedModel):
            self._copy_weights(model.state_dict().items())
            self._serve(0)

    def _build(self) -> None:
        self._decoder: Decoder = build_decoder(self._execution, self._config, self._dtype, self._device, self._longest)
        self._adapter = MergedAdapter(self._decoder.weights())
        self._cache = KVCache(self._decoder.cache_shape, self._limits, self._dtype, self._device)
        self._batch = RunningBatch(self._decoder, self._cache, self._policy)

    @property
    def weight_version(self) -> int:
        """The version that the next token will be sampled from; -1 while there is none."""
        return self._version

    @property
    def has_base(self) -> bool:
        """Whether it holds whole weights that an adapter can be put on."""
        return self._has_base

    @staticmethod
    def unfit_for_adapter(kind: AdapterKind) -> str:
        """Why `update_adapter` cannot take an adapter of this kind; empty: it can."""
        return unfit_for_merging(kind)

    def expected_weights(self) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Name -> dtype and shape of every tensor that `update_weights` wants, tied heads included."""
        return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in self._decoder.weights().items()}

    def weights(self) -> Mapping[str, Tensor]:
        """The storage that is served. Who feeds `update_weights` may write there once it asks for tensors, and hand
        over the very tensors of this mapping."""
        return self._decoder.weights()

    # ---------------------------------------------------------------------------------------------- generating

    async def generate(
        self, request_id: str, token_ids: tuple[int, ...], sampling: SamplingParams, images: tuple[Image, ...] = ()
    ) -> Completion:
        """Continue `token_ids`; waits for a row if all are taken, and while the engine is paused.

        Raises ValueError for a request that cannot be served, RuntimeError if the engine has no weights, sleeps, or
        fails while the request runs.
        """
        request = self._accept(request_id, tuple(token_ids), sampling, images)
        self._open.add(request_id)
        (self._queue if self._later is None else self._later).append(request)
        self._start_driver()
        try:
            return await request.future
        finally:
            self._open.discard(request_id)
            if request.row >= 0:  # the caller was cancelled
                self._batch.drop(request)
            for waiting in (self._queue, self._later or ()):
                if request in waiting:
                    waiting.remove(request)

    @torch.inference_mode()
    def score(self, sequences: Sequence[tuple[int, ...]], temperature: float) -> list[Tensor]:
        """Log-prob of each token of each sequence after the earlier ones, at a temperature; 0 for first tokens.

        Raises ValueError for a sequence that is empty or too long, RuntimeError if the engine serves no weights.
        """
        self._check_serving()
        for number, sequence in enumerate(sequences):
            check_prompt(f"score/{number}", sequence, self._vocabulary, self._longest + 1)
        found: list[Tensor] = []
        for turn in in_turns(sequences, self._policy.tokens_at_once):
            chosen = [sequences[number] for number in turn]
            prompts = PackedPrompts.of(chosen, list(range(len(turn))), self._device)
            scores = self._decoder.score(prompts, temperature)
            found += scores.split([len(sequence) for sequence in chosen])
        return found

    def _accept(
        self, request_id: str, prompt: tuple[int, ...], sampling: SamplingParams, images: tuple[Image, ...]
    ) -> Request:
        check_prompt(request_id, prompt, self._vocabulary, self._longest)
        check_sampling(request_id, sampling, self._vocabulary, self._tokenizer is not None)
        check_adapter(sampling.adapter, self._adapters)
        shown, shift = place_images(request_id, prompt, images, self._config)
        if sampling.routed_experts and self._decoder.routers is None:
            raise ValueError(
                f"request {request_id!r} asks for the experts of its tokens, and {self._config.model_type} has no "
                "routers that can be watched"
            )
        if request_id in self._open:
            raise ValueError(f"request {request_id!r} is already running on {self.replica}")
        self._check_serving()
        eos = () if sampling.ignore_eos else self._eos
        return Request(
            request_id=request_id,
            prompt=prompt,
            sampling=sampling,
            future=asyncio.get_running_loop().create_future(),
            limit=min(sampling.max_tokens, self._longest - len(prompt)),
            stop_ids=(*eos, *sampling.stop_token_ids),
            stop_strings=self._stop_strings(sampling.stop) if sampling.stop else None,
            shown=shown,
            shift=shift,
        )

    def _check_serving(self) -> None:
        asleep = sorted(set(WAKE_TAGS) - self._awake)
        if asleep:
            raise RuntimeError(f"rollout replica {self.replica} is asleep ({', '.join(asleep)}); call wake_up first")
        if self._not_serving:
            raise RuntimeError(f"rollout replica {self.replica} cannot generate: {self._not_serving}")

    def _has_work(self) -> bool:
        able = not (self._paused or self._not_serving) and self._awake == set(WAKE_TAGS)
        return able and bool(self._queue or len(self._batch))

    def _start_driver(self) -> None:
        """Called wherever work may have appeared; without work it does nothing, so it needs no event loop then."""
        if self._has_work() and (self._driver is None or self._driver.done()):
            self._driver = asyncio.get_running_loop().create_task(self._drive(), name=f"rollout {self.replica}")
            self._driver.add_done_callback(self._driver_ended)

    async def _drive(self) -> None:
        """Consumes the queue, produces results; waits for nothing, ends when there is no work or it is paused."""
        while self._has_work():
            began = time.perf_counter()
            self._turn()
            self._busy_s += time.perf_counter() - began
            await asyncio.sleep(0)

    @torch.inference_mode()
    def _turn(self) -> None:
        self._choose_weights()
        self._batch.refill(self._queue, self._merged)
        for request, reason in self._batch.step():
            self._finish(request, reason)

    def _choose_weights(self) -> None:
        """Serve the adapter that the next request wants, once no request of another runs."""
        if len(self._batch) or not self._queue or self._queue[0].sampling.adapter == self._merged:
            return
        self._merged = self._queue[0].sampling.adapter
        wanted = self._adapters[self._merged] if self._merged else self._own
        if wanted is None:
            self._adapter.take_out()
        else:
            self._adapter.put(*wanted)

    def _finish(self, request: Request, reason: StopReason) -> None:
        self._ended[reason] += 1
        request.finish(reason)

    def _driver_ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():
            self._fail_all("the engine's driver was cancelled", None)
        elif (error := task.exception()) is not None:
            self._fail_all(f"rollout replica {self.replica} failed: {error}", error)

    def _fail_all(self, message: str, cause: BaseException | None) -> None:
        """Every waiting `generate` gets the error; the engine is empty afterwards, and can take new requests."""
        for request in [*self._batch.abandon(), *self._queue, *(self._later or ())]:
            request.fail(message, cause)
        self._queue.clear()
        if self._later:
            self._later.clear()
        self._cache.release()

    # ----------------------------------------------------------------------------------------- abort and pause

    async def abort_all(self) -> None:
        """End every running and waiting request now; each `generate` returns the tokens it has."""
        for request in [*self._batch.evict(), *self._queue, *(self._later or ())]:
            self._finish(request, StopReason.ABORTED)
        self._queue.clear()
        if self._later:
            self._later.clear()

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop producing tokens after the current step; `keep`: running requests keep their KV and wait for `resume`.

        `abort`: every request ends with the tokens it has; `wait`: returns when all that are here now are done.
        """
        if mode == "abort":
            await self.abort_all()
        if mode == "wait":
            self._later = deque() if self._later is None else self._later
            while self._has_work():
                await asyncio.sleep(0)
        self._paused = True

    async def resume(self) -> None:
        self._paused = False
        self._queue.extend(self._later or ())
        self._later = None
        self._start_driver()

    # ------------------------------------------------------------------------------------------------- weights

    async def update_weights(
        self, stream: Iterable[tuple[str, Tensor]], version: int, method: Method = "rows"
    ) -> WeightReceipt:
        """Replace every weight between two steps, requests running or not.

        Running requests keep their tokens; their KV of the old weights is dropped and computed anew with the new ones,
        so no token is ever computed from older KV. `method` is of the receipt's digest. Raises ValueError naming
        tensors that are missing, unknown, sent twice or of a wrong shape; then the replica serves nothing until a whole
        update has arrived.
        """
        self._begin_update(version)
        try:
            self._copy_weights(stream)
        except BaseException as error:
            self._fail_all(f"rollout replica {self.replica} lost its weights: {error}", error)
            raise
        self._serve(version)
        return self._receipt(version, self._decoder.weights(), method)

    async def update_adapter(
        self,
        stream: Iterable[tuple[str, Tensor]],
        config: Mapping[str, Any],
        version: int,
        method: Method = "rows",
    ) -> WeightReceipt:
        """Serve the base weights with a LoRA adapter, merged; one that was there before is taken out.

        `stream` has the adapter's tensors under PEFT's names, `config` is PEFT's. The digest is of the adapter as it
        came. Raises RuntimeError if no whole weights came before, and ValueError for an adapter that does not fit; then
        nothing is served until whole weights have come.
        """
        if not self._has_base:
            raise RuntimeError(f"{self.replica} has no base weights: whole weights come before an adapter")
        self._begin_update(version)
        try:
            tensors = {name: tensor.detach().to(self._device, copy=True) for name, tensor in stream}
            with torch.no_grad():
                self._adapter.put(tensors, config)
            self._own = tensors, config
        except BaseException as error:
            self._fail_all(f"rollout replica {self.replica} lost its weights: {error}", error)
            raise
        self._serve(version)
        return self._receipt(version, tensors, method)

    def _begin_update(self, version: int) -> None:
        """Nothing is served from now until `_serve`."""
        if "weights" not in self._awake:
            raise RuntimeError(f"rollout replica {self.replica} has no room for weights: wake_up(('weights',)) first")
        self._requeue_running()
        self._not_serving = f"the update to weights version {version} did not complete"
        self._version, self._has_base, self._merged = -1, False, ""

    def _receipt(self, version: int, taken: Mapping[str, Tensor], method: Method) -> WeightReceipt:
        return WeightReceipt(
            replica=self.replica,
            version=version,
            digest=digest_tensors(taken.items(), method),
            tensors=len(taken),
            bytes=sum(tensor.numel() * tensor.element_size() for tensor in taken.values()),
        )

    @torch.no_grad()
    def _copy_weights(self, stream: Iterable[tuple[str, Tensor]]) -> None:
        targets = self._decoder.weights()
        self._adapter.forget()
        self._own = None
        arrived: set[str] = set()
        for name, tensor in stream:
            if name not in targets:
                raise ValueError(f"{self.replica}: {name!r} is not a weight of {self._config.model_type}")
            if name in arrived:
                raise ValueError(f"{self.replica}: {name!r} was sent twice")
            if tensor.shape != targets[name].shape:
                expected = tuple(targets[name].shape)
                raise ValueError(f"{self.replica}: {name!r} should be of shape {expected}, found {tuple(tensor.shape)}")
            if tensor is not targets[name]:  # else it was written there as it came
                targets[name].copy_(tensor)
            arrived.add(name)
        missing = sorted(targets.keys() - arrived)
        if missing:
            more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
            raise ValueError(f"{self.replica}: not sent: {', '.join(missing[:5])}{more}")

    def _serve(self, version: int) -> None:
        self._version = self._batch.weight_version = version
        self._not_serving, self._has_base = "", True
        self._start_driver()

    async def stop(self, reason: str) -> None:
        """Serve nothing more until whole weights have come; requests that run or wait fail with `reason`."""
        self._not_serving = f"it was stopped ({reason}); send whole weights with update_weights"
        self._version, self._has_base = -1, False
        self._fail_all(f"rollout replica {self.replica} was stopped: {reason}", None)

    def _requeue_running(self) -> None:
        """Running requests go back to the front of the queue, in order, to be prefilled anew."""
        self._queue.extendleft(reversed(self._batch.evict()))

    # ------------------------------------------------------------------------------------------- sleep and wake

    async def sleep(self, level: int) -> None:
        """Give memory back. Level 1: the KV cache (recomputed for running requests); level 2: the weights too."""
        if level not in (1, 2):
            raise ValueError(f"sleep level should be 1 or 2, found {level}")
        self._requeue_running()
        self._cache.release()
        self._awake.discard("kv_cache")
        if level == 2:
            self._awake.discard("weights")
            self._adapter.forget()
            self._version, self._has_base = -1, False
            self._not_serving = "its weights were given back by sleep(2); send them with update_weights"
            for tensor in self._decoder.weights().values():
                tensor.untyped_storage().resize_(0)

    async def wake_up(self, tags: tuple[str, ...] = WAKE_TAGS) -> None:
        """Take memory again for the parts named. After level 2, weights must be sent before anything is generated."""
        if unknown := set(tags) - set(WAKE_TAGS):
            raise ValueError(f"wake_up knows the tags {', '.join(WAKE_TAGS)}; found {', '.join(sorted(unknown))}")
        if "weights" in tags and "weights" not in self._awake:
            counters = self._batch.counters
            self._build()
            self._batch.counters = counters
        self._awake |= set(tags)
        self._start_driver()

    # ------------------------------------------------------------------------------------------------- metrics

    def metrics(self) -> Metrics:
        """What happened since the last call."""
        counters, self._batch.counters = self._batch.counters, Counters()
        ended, self._ended = self._ended, dict.fromkeys(StopReason, 0)
        busy_s, self._busy_s = self._busy_s, 0.0
        found = {
            "rollout/tokens": Metric.sum(counters.tokens),
            "rollout/prefill_tokens": Metric.sum(counters.prefilled_tokens),
            "rollout/shared_prompt_tokens": Metric.sum(counters.shared_tokens),
            "rollout/recomputed_tokens": Metric.sum(counters.recomputed_tokens),
            "rollout/requests": Metric.sum(sum(ended.values())),
            "rollout/aborted": Metric.sum(ended[StopReason.ABORTED]),
            "perf/rollout_busy_seconds": Metric.sum(busy_s),
            "rollout/kv_cache_bytes": Metric.max(self._cache.bytes),
        }
        if counters.steps:
            found["rollout/batch_size"] = Metric.mean(counters.tokens / counters.steps, counters.steps)
            found["perf/rollout_tokens_per_s"] = Metric.mean(counters.tokens / busy_s, busy_s)
        return found


def _dtype(name: str, model: PreTrainedModel | PreTrainedConfig) -> torch.dtype:
    if name != "auto":
        dtype = getattr(torch, name)
        assert isinstance(dtype, torch.dtype)
        return dtype
    return model.dtype if isinstance(model.dtype, torch.dtype) else torch.float32


def _eos_ids(model: PreTrainedModel | PreTrainedConfig, tokenizer: Any) -> tuple[int, ...]:
    """The generation config's end-of-sequence ids; if it has none, the tokenizer's."""
    if isinstance(model, PreTrainedModel):
        generation = model.generation_config
    else:
        generation = GenerationConfig.from_model_config(model)
    found = generation.eos_token_id if generation is not None else None
    if found is None:
        found = getattr(tokenizer, "eos_token_id", None)
    if found is None:
        return ()
    return (found,) if isinstance(found, int) else tuple(found)


def _longest(settings: BuiltinSettings, config: PreTrainedConfig) -> int:
    """Longest sequence that is served. Raises ValueError if the settings promise more than there is."""
    context = getattr(config.get_text_config(), "max_position_embeddings", None) or settings.kv_cache_tokens
    longest = settings.max_sequence_tokens or min(context, settings.kv_cache_tokens)
    if longest > context:
        raise ValueError(f"max_sequence_tokens={longest} is beyond the model's context of {context} tokens")
    if longest > settings.kv_cache_tokens:
        raise ValueError(f"max_sequence_tokens={longest} is more than kv_cache_tokens={settings.kv_cache_tokens}")
    return longest
