"""The built-in rollout engine: continuous batching in the caller's process, on its event loop.

generate           checks and a place in the queue (`scheduler.Scheduler`)
update_weights     between two steps (`EngineWeights`)
abort_all, pause, resume, sleep, wake_up   take effect between two steps
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from hone.rollout.adapters import AdapterFiles, AdapterKind, MergedAdapter, unfit_for_merging
from hone.rollout.admission import WAKE_TAGS, ReplicaState, RequestLimits, check_prompt
from hone.rollout.base import LoadedWeights
from hone.rollout.builtin.batching import PrefillLimits, RunningBatch
from hone.rollout.builtin.cache import CacheLimits, KVCache
from hone.rollout.builtin.decoder import Decoder, build_decoder
from hone.rollout.builtin.model_facts import eos_ids, longest_sequence, run_config, storage_dtype
from hone.rollout.builtin.requests import Request, StopStrings
from hone.rollout.builtin.scheduler import Scheduler
from hone.rollout.builtin.scoring import Following, score_in_turns
from hone.rollout.builtin.states import StateCache
from hone.rollout.prompt_scores import with_prompt_scores
from hone.rollout.settings import BuiltinSettings
from hone.types import Completion, GenerationRequest, Metrics, PauseMode, Scored

_NAMED = 5  # missing tensors that an error names


class BuiltinEngine:
    """The built-in engine: continuous batching with its own copy of the weights, in its own dtype.

    Built from a model, it serves a copy of that model's weights as version 0. Built from a config, it serves nothing
    (version -1) before the first `update_weights`.
    """

    returns_experts = True  # a completion can have the experts of its tokens
    in_process = True  # constructed from a model or config; a server's adapter is, from a `ServerSpec`
    positional_seed = True
    batch_invariant = True  # tokens and log-probs of a request do not depend on the others (on a CPU: bit for bit)
    keep_cache = False  # whether running requests go on with the KV of older weights after an update

    def __init__(
        self,
        settings: BuiltinSettings,
        model: PreTrainedModel | PreTrainedConfig,
        tokenizer: Any = None,
        device: str | torch.device = "cpu",
        replica: str = "builtin-0",
        adapters: Mapping[str, AdapterFiles] | None = None,
    ) -> None:
        """`adapters`: more adapters by name; requests for one wait until requests for others have ended."""
        self.replica = replica
        self._config = run_config(model)
        self._device = torch.device(device)
        self._dtype = storage_dtype(settings.dtype, model)
        self._settings = settings
        self._longest = longest_sequence(settings, self._config)
        self._limits = RequestLimits(self._config, self._longest, tokenizer is not None, (adapters or {}).keys())
        self._eos = eos_ids(model, tokenizer)
        self._stop_strings = lru_cache(maxsize=64)(lambda stop: StopStrings(stop, tokenizer))
        self._state = ReplicaState(replica)
        self._decoder = self._new_decoder()
        self._weights = EngineWeights(replica, self._config.model_type, self._decoder, adapters or {})
        self._scheduler = Scheduler(self._state, self._new_batch(), self._weights)
        if isinstance(model, PreTrainedModel):
            self._weights.load(model.state_dict().items())
            self._serve(0)

    def _new_decoder(self) -> Decoder:
        return build_decoder(self._settings.execution, self._config, self._dtype, self._device, self._longest)

    def _new_batch(self) -> RunningBatch:
        limits = CacheLimits(self._settings.slots, self._settings.kv_cache_tokens, self._settings.kept_kv_tokens)
        shapes = self._decoder.cache_shapes
        cache = (StateCache if shapes[0].carries_state else KVCache)(shapes, limits, self._dtype, self._device)
        prefill = PrefillLimits(self._settings.prefill_tokens, self._settings.share_prompts)
        return RunningBatch(self._decoder, cache, prefill)

    @property
    def weight_version(self) -> int:
        """The version that the next token will be sampled from; -1 while there is none."""
        return self._state.version

    @property
    def has_base(self) -> bool:
        """Return whether it holds whole weights that an adapter can be put on."""
        return self._state.has_base

    @property
    def longest(self) -> int:
        """Longest sequence of prompt and completion, in tokens."""
        return self._longest

    @staticmethod
    def unfit_for_adapter(kind: AdapterKind) -> str:
        """Why `update_adapter` cannot take an adapter of this kind; empty: it can."""
        return unfit_for_merging(kind)

    def expected_weights(self) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Name -> dtype and shape of every tensor that `update_weights` wants, tied heads included."""
        return {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in self.weights().items()}

    def weights(self) -> Mapping[str, Tensor]:
        """The engine's own weights. A caller of `update_weights` may write into them once it is asked for tensors, and
        pass the tensors of this mapping themselves."""
        return self._weights.tensors

    # ---------------------------------------------------------------------------------------------- generating

    async def generate(self, request: GenerationRequest) -> Completion:
        """Continue the tokens of a request; waits for a row if all are taken, and while the engine is paused.

        Raises ValueError for a request that cannot be served, RuntimeError if the engine has no weights, sleeps, or
        fails while the request runs.
        """
        if request.sampling.prompt_logprobs is not None:
            return await with_prompt_scores(request, self.score, self.generate)
        return await self._scheduler.run(self._accept(request))

    async def score(self, request_id: str, token_ids: tuple[int, ...], top_k: int = 0) -> Scored:
        """Compute each token's log-prob after the earlier ones, at temperature 1; raises as `score_all` does."""
        (found,) = self.score_all([tuple(token_ids)], 1.0, min(top_k, self._limits.vocabulary))
        return found.scored()

    @torch.inference_mode()
    def score_all(self, sequences: Sequence[tuple[int, ...]], temperature: float, top_k: int = 0) -> list[Following]:
        """Compute the log-prob of each token of each sequence after the earlier ones, at a temperature.

        Raises ValueError for a sequence that is empty or too long, RuntimeError if the engine serves no weights.
        """
        self._state.check_serving()
        for number, sequence in enumerate(sequences):
            check_prompt(f"score/{number}", sequence, self._limits.vocabulary, self._longest + 1)
        with self._weights.of_policy():
            score = partial(self._decoder.score, temperature=temperature, top_k=top_k)
            return score_in_turns(score, sequences, self._settings.prefill_tokens, self._device)

    def _accept(self, request: GenerationRequest) -> Request:
        sampling = request.sampling
        placed, shift = self._limits.check(request)
        if sampling.routed_experts and self._decoder.routers is None:
            raise ValueError(
                f"request {request.id!r} asks for the experts of its tokens, and {self._config.model_type} has no "
                "routers that can be watched"
            )
        self._scheduler.check_new(request.id)
        self._state.check_serving()
        eos = () if sampling.ignore_eos else self._eos
        return Request(
            request_id=request.id,
            prompt=request.tokens,
            sampling=sampling,
            future=asyncio.get_running_loop().create_future(),
            limit=min(sampling.max_tokens, self._longest - len(request.tokens)),
            stop_ids=(*eos, *sampling.stop_token_ids),
            stop_strings=self._stop_strings(sampling.stop) if sampling.stop else None,
            images=placed,
            shift=shift,
        )

    # ----------------------------------------------------------------------------------------- abort and pause

    async def abort_all(self) -> None:
        """End every running and waiting request now; each `generate` returns the tokens it has."""
        self._scheduler.abort_all()

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stop producing tokens after the current step; `keep`: running requests keep their KV and wait for `resume`.

        `abort`: every request ends with the tokens it has; `wait`: returns when all that are here now are done.
        """
        if mode == "abort":
            self._scheduler.abort_all()
        if mode == "wait":
            await self._scheduler.drain()
        self._state.paused = True

    async def resume(self) -> None:
        self._state.paused = False
        self._scheduler.admit_later()

    # ------------------------------------------------------------------------------------------------- weights

    async def update_weights(self, stream: Iterable[tuple[str, Tensor]], version: int) -> LoadedWeights:
        """Replace every weight between two steps, requests running or not.

        Running requests keep their tokens; their KV of the old weights is dropped and computed anew with the new
        ones, so no token is ever computed from older KV (except with `keep_cache`, which new requests never share).
        Returns the weights as stored. Raises ValueError naming
        tensors that are missing, unknown, sent twice or of a wrong shape; then the replica serves nothing until a
        whole update has arrived.
        """
        self._begin_update(version)
        try:
            self._weights.load(stream)
        except BaseException as error:
            self._scheduler.fail_all(f"rollout replica {self.replica} lost its weights: {error}", error)
            raise
        self._serve(version)
        return LoadedWeights(self.replica, version, self.weights())

    async def update_adapter(
        self, stream: Iterable[tuple[str, Tensor]], config: Mapping[str, Any], version: int
    ) -> LoadedWeights:
        """Merge a LoRA adapter into the base weights, in place of the previous one.

        `stream` has the adapter's tensors under PEFT's names, `config` is PEFT's. Returns the adapter as it came.
        Raises RuntimeError if no whole weights came before, and ValueError for an adapter that does not fit; then
        nothing is served until whole weights have come.
        """
        self._begin_update(version, is_adapter=True)
        try:
            tensors = {name: tensor.detach().to(self._device, copy=True) for name, tensor in stream}
            self._weights.put_policy_adapter(tensors, config)
        except BaseException as error:
            self._scheduler.fail_all(f"rollout replica {self.replica} lost its weights: {error}", error)
            raise
        self._serve(version)
        return LoadedWeights(self.replica, version, tensors)

    def _begin_update(self, version: int, is_adapter: bool = False) -> None:
        """Serve nothing from now until `_serve`."""
        self._state.check_update(is_adapter)
        if self.keep_cache:
            self._scheduler.batch.keep()
        else:
            self._scheduler.requeue_running()
        self._scheduler.batch.cache.prefixes.clear()
        self._state.lose(f"the update to weights version {version} did not complete")
        self._weights.merged = ""

    def _serve(self, version: int) -> None:
        self._state.serve(version)
        self._scheduler.batch.weight_version = version
        self._scheduler.wake()

    async def stop(self, reason: str) -> None:
        """Serve nothing more until whole weights have come; requests that run or wait fail with `reason`."""
        self._state.stop(reason)
        self._scheduler.fail_all(f"rollout replica {self.replica} was stopped: {reason}", None)

    # ------------------------------------------------------------------------------------------- sleep and wake

    async def sleep(self, level: int) -> None:
        """Free memory. Level 1: the KV cache (recomputed for running requests); level 2: the weights too."""
        self._state.sleep(level, ("kv_cache",) if level == 1 else WAKE_TAGS)
        self._scheduler.requeue_running()
        self._scheduler.batch.cache.release()
        if level == 2:
            self._weights.free()

    async def wake_up(self, tags: tuple[str, ...] = WAKE_TAGS) -> None:
        """Allocate memory again for these parts. After level 2, weights must be sent before anything is generated."""
        if "weights" in self._state.asleep(tags):
            counters = self._scheduler.batch.counters
            self._decoder = self._new_decoder()
            self._weights.use(self._decoder)
            self._scheduler.batch = self._new_batch()
            self._scheduler.batch.counters = counters
        self._state.wake(tags)
        self._scheduler.wake()

    def metrics(self) -> Metrics:
        """Figures since the last call."""
        return self._scheduler.metrics()


class EngineWeights:
    """Storage of one decoder, and what is merged into it."""

    def __init__(self, replica: str, model_type: str, decoder: Decoder, adapters: Mapping[str, AdapterFiles]) -> None:
        """`adapters`: all by name but the policy's own."""
        self.merged = ""  # name of the adapter that is merged now; empty: the policy's own, if it has one
        self._replica = replica
        self._model_type = model_type
        self.adapters = {name: (one.tensors(), one.config) for name, one in adapters.items()}
        self._policy_adapter: tuple[Mapping[str, Tensor], Mapping[str, Any]] | None = None
        self.use(decoder)

    def use(self, decoder: Decoder) -> None:
        """Keep weights in this decoder's storage from now on; it has none yet."""
        self.tensors = decoder.weights()
        self._merging: MergedAdapter | None = None  # from the first adapter on; the weights are whole without it

    @torch.no_grad()
    def load(self, stream: Iterable[tuple[str, Tensor]]) -> None:
        """Copy every weight from `stream`; a tensor of `self.tensors` itself is already in its place.

        Raises ValueError naming tensors that are missing, unknown, sent twice or of a wrong shape.
        """
        targets = self.tensors
        self._merging = None
        self._policy_adapter = None
        arrived: set[str] = set()
        for name, tensor in stream:
            if name not in targets:
                raise ValueError(f"{self._replica}: {name!r} is not a weight of {self._model_type}")
            if name in arrived:
                raise ValueError(f"{self._replica}: {name!r} was sent twice")
            if tensor.shape != targets[name].shape:
                expected, found = tuple(targets[name].shape), tuple(tensor.shape)
                raise ValueError(f"{self._replica}: {name!r} should be of shape {expected}, found {found}")
            if tensor is not targets[name]:
                targets[name].copy_(tensor)
            arrived.add(name)
        missing = sorted(targets.keys() - arrived)
        if missing:
            more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            raise ValueError(f"{self._replica}: not sent: {', '.join(missing[:_NAMED])}{more}")

    @torch.no_grad()
    def put_policy_adapter(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        """Merge the policy's own adapter, in place of the one before. Raises ValueError if it does not fit."""
        self._merge(tensors, config)
        self._policy_adapter = tensors, config

    def switch_to(self, adapter: str) -> None:
        """Merge the adapter of this name; empty: the policy's own."""
        self.merged = adapter
        wanted = self.adapters[adapter] if adapter else self._policy_adapter
        if wanted is not None:
            self._merge(*wanted)
        elif self._merging is not None:
            self._merging.take_out()

    def _merge(self, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
        self._merging = self._merging or MergedAdapter(self.tensors)
        self._merging.put(tensors, config)

    @contextmanager
    def of_policy(self) -> Iterator[None]:
        """The weights of the policy, whichever adapter is merged for the requests that run."""
        merged = self.merged
        if merged:
            self.switch_to("")
        try:
            yield
        finally:
            if merged:
                self.switch_to(merged)

    def free(self) -> None:
        """Give the memory back; `use` begins again."""
        self._merging = None
        for tensor in self.tensors.values():
            tensor.untyped_storage().resize_(0)
