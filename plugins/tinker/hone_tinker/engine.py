"""The engine `tinker`: the verbs of a training engine as requests to a service.

    infer_batch        forward_backward with forward_only; without the adapter: prompt log-probs of the base's sampler
    forward_backward   a loss of the service (`named_losses`), or token weights (`gradients`) as weighted cross_entropy
    optimizer_step     optim_step, with the parameters of AdamW and this step's learning rate
    weights            save_weights_for_sampler: the name of the sampler takes the place of the weights
    checkpoints        save_weights, load_weights with the optimizer's state

The service holds the weights; a weight sync sends the name of a sampler, and a sequence to check it with.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hone.engines.base import EngineSpec, MemoryNeeds, OneProcess
from hone.engines.optimizers import Schedule
from hone.engines.settings import LoraConfig, OptimizerConfig
from hone.models.vision.image_processor import save_language
from hone.runtime import ranks
from hone.types import Batch, LossFn, Metric, Metrics, ModelOutput, Need, TopK, merge_metrics
from hone_tinker.base_scorer import BaseScorer
from hone_tinker.connection import ServiceFailed, connect, field_of
from hone_tinker.gradients import check_needs, fixed_weights, targets, token_weights
from hone_tinker.messages import ServiceLoss, cross_entropy, read_logprobs, training_requests
from hone_tinker.named_losses import differ, named_loss, named_weights
from hone_tinker.settings import ServiceSettings

STATE = "service.json"  # of a checkpoint
LOG = logging.getLogger("hone.tinker")
SNAPSHOT, PROBE_TOKENS, PROBE_LOGPROBS = "sampler", "probe.token_ids", "probe.logprobs"
"""Names of the tensors that a weight sync sends in place of weights."""
PROBE_LENGTH = 256  # first tokens of a sequence that a sync is checked with
DOWNLOAD_S = 3600  # the files of an export are needed at once


class ServiceEngine:
    """See `hone.engines.base.BaseEngine`. With `spec.total_steps == 0` it is the base model, which only infers."""

    model_type = "language_model"

    def __init__(self, spec: EngineSpec, device: str) -> None:
        """Raises ValueError naming the key of a setting that the protocol has no place for."""
        config = spec.engine
        assert isinstance(config.backend, ServiceSettings)
        if ranks.ranks() > 1:
            raise ValueError("runtime.backend=tinker computes nothing here: start it without torchrun")
        if spec.temperature != 1.0:
            raise ValueError(
                f"rollout.sampling.temperature = {spec.temperature:g}: services compute log-probs at temperature 1; "
                "set it to 1"
            )
        if spec.follows:
            raise ValueError("reference.follow moves weights, and the service holds them; remove it")
        self.ranks = OneProcess()
        self._spec, self._backend = spec, config.backend
        self._lora = None if config.lora is None else _adapter_settings(config.lora)
        self._adam = _adam(config.optimizer, config.max_grad_norm) if spec.total_steps else {}
        self._peak = config.optimizer.lr if spec.total_steps else 0.0
        self._schedule = Schedule(config.schedule, spec.total_steps) if spec.total_steps else None
        prices = config.backend.prices
        self._checks = config.backend.check_snapshot
        self._prices = None if prices is None else [prices.prefill, prices.sample, prices.train]
        self._adapter = True  # False inside of `disable_adapter`
        self._probe: Tensor | None = None  # [n] tokens of a trained sequence
        self._base: BaseScorer | None = None  # once it was asked

    def initialize(self) -> None:
        """Open a session, and a model in it. Raises ServiceFailed, ConfigError."""
        backend = self._backend
        self._service = connect(backend.url, backend.timeout_s)
        self._base_model = backend.base_model or str(self._spec.model.path)
        if self._schedule is None:
            return
        LOG.warning(
            "the service at %s shows no digest of its weights: each new snapshot is compared with the trainer by "
            "log-probs instead, and the run stops if it answers like an older one",
            backend.url,
        )
        body: dict[str, Any] = {
            "session_id": self._service.session_id,
            "model_seq_id": next(self._service.model_numbers),
            "base_model": self._base_model,
            "user_metadata": None,
        }
        if self._lora is not None:
            body["lora_config"] = self._lora
        made = self._service.wait(self._service.result("create_model", body))
        self._model_id = str(field_of(made, "model_id", f"create_model at {backend.url}"))
        self._seq = 0

    # ------------------------------------------------------------------------------------------------------ training

    def train_batch(self, batch: Batch, loss: LossFn) -> Metrics:
        metrics = self.forward_backward(batch, loss)
        return merge_metrics(metrics, self.optimizer_step(), self.lr_scheduler_step())

    def forward_backward(self, batch: Batch, loss: LossFn) -> Metrics:
        """See `BaseEngine`. A loss of ratios that the service does not have by name takes one forward more."""
        check_needs(loss)
        if batch.loss_weights is None:
            raise ValueError("Batch.loss_weights is not set: the loss has no denominator (see aggregation)")
        wanted, weights = targets(loss, batch), fixed_weights(loss, batch)
        own = named_loss(loss, batch) if weights is None and self._backend.named_losses else None
        if weights is not None:
            _, step = token_weights(loss, batch, self._train(batch, cross_entropy(wanted, weights.float())))
        elif own is not None:
            logprobs = self._train(batch, own)
            weights, step = token_weights(loss, batch, logprobs)
            rest = weights - named_weights(own, batch, logprobs)
            if differ(rest, weights):  # ratios beyond hone's limits, which the service's losses do not have
                self._train(batch, cross_entropy(wanted, rest.float()))
        else:
            weights, step = token_weights(loss, batch, self._logprobs(batch, wanted))
            self._train(batch, cross_entropy(wanted, weights.float()))
        self._remember(batch)
        return step.metrics()

    def _logprobs(self, batch: Batch, wanted: Tensor) -> Tensor:
        """Log-probs of tokens [T] or [T, K] in the sequences with a loss, 0 elsewhere."""
        return self._train(batch, cross_entropy(wanted, torch.zeros(wanted.shape)), forward_only=True)

    def _train(self, batch: Batch, loss: ServiceLoss, forward_only: bool = False) -> Tensor:
        """Add the gradient of a loss; return the log-probs of its targets as `_logprobs` does."""
        wanted, bounds = loss.inputs["target_tokens"], batch.cu_seqlens.tolist()
        chosen = [(a, b) for a, b in pairwise(bounds) if bool(batch.loss_mask[a:b].any())]
        sequences = [(batch.token_ids[a:b], loss.of(a, b)) for a, b in chosen]
        requests = training_requests(self._model_id, self._seq + 1, sequences, forward_only)
        self._seq += len(requests)
        found = torch.zeros(wanted.shape)
        rows = [row for body in self._service.wait(self._results(requests)) for row in read_logprobs(body)]
        for (a, b), row in zip(chosen, rows, strict=True):
            found[a + 1 : b] = row.view(wanted[a + 1 : b].shape)
        self._service.usage.trained += sum(b - a for a, b in chosen)
        return torch.where(batch.loss_mask.view(-1, *[1] * (wanted.dim() - 1)), found, 0)

    async def _results(self, requests: Sequence[bytes]) -> list[bytes]:
        found: list[bytes] = await asyncio.gather(*(self._service.result("forward_backward", one) for one in requests))
        return found

    def _remember(self, batch: Batch) -> None:
        """Keep a sequence that was trained, to check the next sampler with."""
        start, end = batch.cu_seqlens[-2:].tolist()
        self._probe = batch.token_ids[start : min(end, start + PROBE_LENGTH)].clone()

    def _command(self, verb: str, /, **body: Any) -> Any:
        """Run one command of the model in its turn."""
        self._seq += 1
        return self._service.wait(self._service.result(verb, {"model_id": self._model_id, "seq_id": self._seq, **body}))

    def _saved(self, verb: str, field: str, **body: Any) -> str:
        """Run a command that saves weights; returns the name that the service gave them."""
        return str(field_of(self._command(verb, **body), field, f"{verb} at {self._service.url}"))

    def optimizer_step(self) -> Metrics:
        rate = self._rate()
        found = self._command("optim_step", adam_params={**self._adam, "learning_rate": rate}).get("metrics") or {}
        metrics = {"train/lr": Metric.mean(rate), "train/skipped_steps": Metric.sum(found.get("skipped:sum", 0.0))}
        norm = found.get("grad_norm:mean")
        return metrics | ({} if norm is None else {"train/grad_norm": Metric.mean(norm)})

    def _rate(self) -> float:
        assert self._schedule is not None
        return self._peak * self._schedule.factor(self._schedule.step_count)

    def lr_scheduler_step(self) -> Metrics:
        assert self._schedule is not None
        self._schedule.step_count += 1
        return {}

    def infer_batch(self, batch: Batch, needs: frozenset[Need] = frozenset()) -> ModelOutput:
        """See `BaseEngine`. Raises ValueError for needs beyond log-probs and, of the base model, likely tokens."""
        trained = self._adapter and self._schedule is not None
        likely = [need.count for need in needs if isinstance(need, TopK) and not trained]
        if len(likely) < len(needs):
            wanted = ", ".join(sorted(map(str, needs)))
            raise ValueError(f"{wanted} of a forward is needed, and services return log-probs only")
        if trained:
            return ModelOutput(logprobs=self._logprobs(batch, batch.token_ids))
        if self._base is None:
            self._base = BaseScorer(self._service, self._base_model)
        return self._base(batch, max(likely, default=0))

    def train_mode(self) -> AbstractContextManager[None]:
        return nullcontext()

    def eval_mode(self) -> AbstractContextManager[None]:
        return nullcontext()

    # ------------------------------------------------------------------------------------------------- weights, files

    def get_per_tensor_param(
        self, adapter_only: bool = False, dtype: torch.dtype | None = None
    ) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any] | None]:
        """The name of a new sampler, as numbers, and the log-probs of a sequence by the weights that it should have."""
        if adapter_only or not self._adapter:
            raise ValueError("the service holds the weights of base and adapter: set actor.lora.sync=auto")
        return self._snapshot(), None

    def _snapshot(self) -> Iterator[tuple[str, Tensor]]:
        number = next(self._service.sampling_numbers)
        named = {"sampling_session_seq_id": number, "kind": "snapshot"}
        session = self._saved("save_weights_for_sampler", "sampling_session_id", **named)
        told = {"url": self._service.url, "session": session, "prices": self._prices}
        yield SNAPSHOT, torch.tensor(list(json.dumps(told).encode()), dtype=torch.float32)
        if self._probe is not None and self._checks:
            request = training_requests(
                self._model_id,
                self._seq + 1,
                [(self._probe, cross_entropy(self._probe, torch.zeros(len(self._probe))))],
                True,
            )
            self._seq += 1
            self._service.usage.trained += len(self._probe)
            ((logprobs,),) = [read_logprobs(one) for one in self._service.wait(self._results(request))]
            yield PROBE_TOKENS, self._probe
            yield PROBE_LOGPROBS, logprobs

    def save_checkpoint(self, folder: Path, wait: bool = True) -> None:
        """Have the service save weights and optimizer; its name and the schedule are written into the folder."""
        assert self._schedule is not None
        path = self._saved("save_weights", "path", path=f"hone-{folder.parent.name}-{secrets.token_hex(6)}")
        state = {"url": self._service.url, "path": path, "schedule_step": self._schedule.step_count}
        (folder / STATE).write_text(json.dumps(state, indent=1), encoding="utf-8")

    def checkpoint_written(self, wait: bool = False) -> bool:
        return True

    def load_checkpoint(self, folder: Path) -> None:
        """Raises ServiceFailed if the service no longer has the checkpoint."""
        assert self._schedule is not None
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
        self._command("load_weights", path=state["path"], optimizer=True)
        self._schedule.step_count = state["schedule_step"]

    def adapter_config(self) -> dict[str, Any] | None:
        return None if self._lora is None else {"peft_type": "LORA", "r": self._lora["rank"]}

    def export_hf(self, folder: Path) -> None:
        """Fetch the trained weights as Hugging Face files: with LoRA the adapter, as the service holds the base."""
        saved = f"hone-{secrets.token_hex(6)}"
        path = self._saved("save_weights_external", "path", path=saved, ttl_seconds=DOWNLOAD_S)
        run, _, checkpoint = path.removeprefix("tinker://").partition("/")
        place = f"training_runs/{run}/checkpoints/{checkpoint}/external_weights_urls"
        folder.mkdir(parents=True, exist_ok=True)
        found = self._service.wait(self._service.request("GET", place))
        urls: Mapping[str, str] = field_of(found, "urls", f"{place} at {self._service.url}")
        for file, url in urls.items():
            name = Path(file).name
            if name in ("", ".."):
                raise ServiceFailed(f"the service named a file of the export {file!r}; expected a plain name")
            (folder / name).write_bytes(self._service.wait(self._service.request("GET", url)))
        save_language(self._spec.model, folder)
        self._service.succeeded()

    def export_adapter(self, folder: Path) -> None:
        self.export_hf(folder)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        if self._lora is None:
            raise ValueError("this engine trains all weights: it has no adapter (actor.lora is not set)")
        self._adapter = False
        try:
            yield
        finally:
            self._adapter = True

    def blend(self, tensors: Mapping[str, Tensor], mixup: float) -> None:
        raise ValueError("the service holds the weights: they cannot be blended here")

    def memory_needs(self) -> MemoryNeeds:
        return MemoryNeeds()

    def to(self, device: str, *, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Does nothing: no memory of this machine is used."""


def _adapter_settings(lora: LoraConfig) -> dict[str, Any]:
    """`lora_config` of a request. Raises ValueError for what the protocol does not send."""
    plain = LoraConfig()
    for name in LoraConfig.model_fields:
        if name not in ("rank", "seed", "sync") and getattr(lora, name) != getattr(plain, name):
            raise ValueError(
                f"{lora.key_of(name)} = {getattr(lora, name)}: requests to a service have rank and seed only; remove it"
            )
    return {"rank": lora.rank, "seed": lora.seed, "train_unembed": True, "train_mlp": True, "train_attn": True}


def _adam(optimizer: OptimizerConfig, max_norm: float | None) -> dict[str, float]:
    """`adam_params` of a request, without the learning rate. Raises ValueError for another optimizer."""
    if optimizer.name != "AdamW":
        raise ValueError(f"{optimizer.key_of('name')} = {optimizer.name}: services have AdamW; set AdamW")
    others = sorted(optimizer.options.keys() - {"eps"})
    if others:
        raise ValueError(f"{optimizer.key_of('options')}.{others[0]} is not sent to services; eps is")
    first, second = optimizer.betas or (0.9, 0.999)
    return {
        "beta1": first,
        "beta2": second,
        "eps": optimizer.options.get("eps", 1e-8),
        "weight_decay": optimizer.weight_decay,
        "grad_clip_norm": max_norm or 0.0,
    }
