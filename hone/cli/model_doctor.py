"""`hone doctor --model` and `hone doctor RUN.yaml`: a model, the features of hone that it supports, its memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hone.cli.finding import Finding
from hone.cli.recipe import load_recipe
from hone.config import ConfigError
from hone.engines.settings import EngineConfig
from hone.models.settings import ModelConfig
from hone.planner.anatomy import Anatomy, examine
from hone.planner.memory import Layout, Role, activation_bytes_per_token, logits_bytes, static
from hone.rollout import ROLLOUT_ENGINES
from hone.rollout.servers.engine import check_packages, environment_python
from hone.runtime.settings import RaySettings
from hone.trainers.run.run_model import FOLDER, local_model

LARGEST_DEGREE = 64
DEVICES = (1, 2, 4, 8)
INSTALL = "see docs/rollout.md"


@dataclass(frozen=True, slots=True)
class ModelReport:
    """The findings about a model, as text and as numbers."""

    facts: tuple[Finding, ...]
    numbers: dict[str, Any]  # for --json


def model_report(path: str, revision: str | None, devices: int | None, lora_rank: int) -> ModelReport:
    """Describe the model at `path`. Raises ModelError for a model that hone would not load."""
    return _report(ModelConfig(path=path, revision=revision), devices, lora_rank)


def _report(model: ModelConfig, devices: int | None, lora_rank: int = 16) -> ModelReport:
    anatomy = examine(model)
    counts = (devices,) if devices else DEVICES
    kinds = [(0, False), (lora_rank, False), *([(lora_rank, True)] if anatomy.linear else [])]
    memory = [
        {"devices": count, "lora_rank": rank, "four_bit": four_bit, **asdict(found), "total": found.total}
        for rank, four_bit in kinds
        for count in counts
        for found in [static(_role(anatomy, count, rank, four_bit))]
    ]
    degrees = {name: fitting(anatomy, name) for name in ("tensor", "sequence", "expert")}
    chunk = EngineConfig.model_fields["logprob_chunk_tokens"].default
    numbers = {
        "model": asdict(anatomy),
        "degrees": degrees,
        "memory": memory,
        "activation_bytes_per_token": activation_bytes_per_token(_role(anatomy)),
        "activation_bytes_per_token_with_checkpointing": activation_bytes_per_token(
            replace(_role(anatomy), recompute=True)
        ),
        "logits_bytes": logits_bytes(replace(_role(anatomy), chunk=chunk)),
        "kv_bytes_per_token": anatomy.kv_bytes_per_token(),
    }
    facts = (*_what(anatomy), *_features(anatomy, degrees), *_memory(memory, numbers, chunk))
    return ModelReport(facts, numbers)


def run_report(recipe: Path, overrides: Sequence[str], machine: Iterable[Finding]) -> Iterator[Finding]:
    """The findings about a machine that concern one run file, then its model. Raises ConfigError and ModelError.

    Of engines and servers only those that the run uses are shown.
    """
    config = load_recipe(recipe, overrides).config
    backends = {"training engines": {config.actor.backend.name}}
    if (rollout := getattr(config, "rollout", None)) is not None:
        backends["rollout servers"] = {rollout.backend}
    wanted = {"machine", "platforms", *backends} | ({"sandboxes"} if rollout is not None else set())
    for found in machine:
        if found.section in wanted and found.name in backends.get(found.section, {found.name}):
            if found.section == "rollout servers" and rollout is not None and rollout.python:
                found = _named_python(rollout.backend, rollout.python)
            yield found
    if isinstance(config.runtime.backend, RaySettings):
        yield _ray(config.runtime.backend)
    if not config.actor.backend.computes_here:
        yield Finding("model", "on a service", None, f"{config.runtime.backend.name} needs no memory here")
    else:
        yield from _model_of(config)
    yield Finding("data and rewards", "not tried", None, f"hone check {recipe} tries them, and the memory of this run")


def _named_python(backend: str, python: str) -> Finding:
    """The interpreter that `rollout.python` names, and whether it has the server's packages."""
    try:
        found = environment_python(backend, python, INSTALL)
        check_packages(found, backend, INSTALL)
    except ConfigError as error:
        return Finding("rollout servers", backend, False, str(error))
    return Finding("rollout servers", backend, True, str(found))


def _ray(backend: RaySettings) -> Finding:
    """Look for Ray here, and name the ranks that the run asks a cluster for."""
    if find_spec("ray") is None:
        return Finding("runtime", "ray", False, "the package ray is not installed: pip install 'ray>=2.60'")
    wanted = f"{backend.nodes} node(s) with {backend.devices} device(s) each"
    return Finding("runtime", "ray", True, f"ray {version('ray')}; the run asks for {wanted}: compare `ray status`")


def _model_of(config: Any) -> Iterator[Finding]:
    """The model of a run, on as many devices as the run has ranks."""
    with TemporaryDirectory(prefix="hone-doctor-") as folder:
        model = local_model(config.model, Path(folder) / FOLDER)
        lora = config.actor.lora
        rank = {} if lora is None else {"lora_rank": lora.rank}
        yield from _report(model, config.runtime.most_ranks(), **rank).facts


def _role(anatomy: Anatomy, devices: int = 1, lora_rank: int = 0, four_bit: bool = False) -> Role:
    """A model that is trained with `backend: fsdp2` in float32, computed in bfloat16, and sharded over all devices.

    `lora_rank`: train an adapter on every linear layer and freeze the weights.
    """
    adapter = anatomy.lora_parameters(lora_rank) if lora_rank else 0
    return Role("actor", anatomy, adapter=adapter, four_bit=four_bit, layout=Layout(shard=devices))


def fitting(anatomy: Anatomy, dimension: str) -> list[int]:
    """Values of `parallel.<dimension>` above 1 that divide the model; see `hone.engines.fsdp2.sharding`."""
    sizes = range(2, LARGEST_DEGREE + 1)
    heads = {(one.heads, one.kv_heads) for one in anatomy.attention}
    if dimension == "tensor":
        fit = [n for n in sizes if all(queries % n == 0 and pairs % n == 0 for queries, pairs in heads)]
        return fit if anatomy.tensor_plan else []
    if dimension == "sequence" and (anatomy.index_size or anatomy.stateful):
        return []
    if dimension == "sequence":
        return [n for n in sizes if all(q % n == 0 and (pairs % n == 0 or n % pairs == 0) for q, pairs in heads)]
    return [n for n in sizes if anatomy.experts % n == 0] if anatomy.experts and anatomy.expert_plan else []


def _what(anatomy: Anatomy) -> Iterator[Finding]:
    files = anatomy.files

    def fact(name: str, detail: str) -> Finding:
        return Finding("model", name, None, detail)

    yield fact("family", f"{anatomy.family} ({anatomy.architecture}), {files.head}")
    active = f", {_count(anatomy.active)} active per token" if anatomy.experts else ""
    yield fact(
        "parameters", f"{_count(anatomy.parameters)}{active}; {_count(anatomy.embedding)} in embeddings and head"
    )
    yield fact("layers", f"{anatomy.layers}, {anatomy.hidden} wide; MLP {anatomy.mlp}")
    shapes = "; ".join(_shapes(anatomy)) + _window(anatomy)
    yield fact("attention", shapes if anatomy.attention else "none")
    if anatomy.experts:
        yield fact("experts", f"{anatomy.experts} per layer, {anatomy.experts_per_token} per token")
    yield fact("vocabulary", f"{anatomy.vocabulary:,}; head {'tied to the embeddings' if anatomy.tied else 'not tied'}")
    yield fact("context", f"{anatomy.context:,} tokens" if anatomy.context else "not in the config")
    count = f"{files.count} file{'s' * (files.count != 1)}, {_bytes(files.bytes)}, " if files.count else ""
    yield fact(
        "weights",
        f"{count}{files.dtype or 'dtype unknown'}" + (f", quantised: {files.quantised}" * bool(files.quantised)),
    )
    if files.left_out:
        yield fact("not read", files.unread())


def _shapes(anatomy: Anatomy) -> Iterator[str]:
    """Each shape of attention; with the number of layers that have it, if there are several."""
    counts = Counter(anatomy.attention)
    for one, count in counts.items():
        sizes = f"{one.key_size}" + (f" (values {one.value_size})" * (one.key_size != one.value_size))
        layers = f"in {count} layers " * (len(counts) > 1)
        if one.cached:
            yield f"{layers}{one.heads} query heads, {one.kv_heads} key-value heads of {sizes}"
        else:
            yield f"{layers}{one.heads} query heads over the keys of an earlier layer, of {sizes}"


def _window(anatomy: Anatomy) -> str:
    return f", sliding window of {anatomy.window}" if anatomy.window else ""


def _features(anatomy: Anatomy, degrees: dict[str, list[int]]) -> Iterator[Finding]:
    def fact(name: str, ok: bool, detail: str) -> Finding:
        return Finding("features", name, ok, detail)

    obstacle = anatomy.obstacle
    yield fact("packed attention", not obstacle, obstacle or "checked at the start of a run")
    if anatomy.states:
        with_state = ", ".join(anatomy.states)
        yield fact("layers with a state", True, f"{with_state}: they see one sequence of a packed row at a time")
    heads = "no number divides its heads"
    mixing = "layers that carry a state do not support it" if anatomy.stateful else heads
    reasons = {
        "tensor": heads if anatomy.tensor_plan else "transformers has no tensor-parallel plan",
        "sequence": "its indexers need whole sequences" if anatomy.index_size else mixing,
        "expert": "the model has no experts" if not anatomy.experts else "transformers has no expert-parallel plan",
    }
    for name, found in degrees.items():
        yield fact(f"parallel.{name}", bool(found), _listing(found) if found else reasons[name])
    experts = f"; if named: experts.{', experts.'.join(anatomy.expert_matrices)}" if anatomy.expert_matrices else ""
    yield fact("LoRA targets", bool(anatomy.adapted), ", ".join(anatomy.adapted) + experts)
    for why, names in anatomy.unadapted.items():
        yield Finding("features", "no LoRA", None, f"{', '.join(names)}: {why}")
    for name in ROLLOUT_ENGINES:
        if name == "builtin":
            kept = ", and keeps the states beside the KV cache" * anatomy.stateful
            yield fact("rollout builtin", not obstacle, obstacle or f"uses the same attention as training{kept}")
        else:
            detail = f"{name} checks at its start whether it supports {anatomy.architecture}"
            yield Finding("features", f"rollout {name}", None, detail)
    if anatomy.files.quantised:
        yield fact("quantised", True, "dequantised into the run folder at the start of a run")


def _memory(rows: Sequence[dict[str, Any]], numbers: dict[str, Any], chunk: int) -> Iterator[Finding]:
    for row in rows:
        adapter = "QLoRA" if row["four_bit"] else "LoRA"
        kind = f"{adapter}, rank {row['lora_rank']}" if row["lora_rank"] else "all weights"
        named = {**{name: name for name in ("weights", "gradients", "optimizer")}, "gathered": "layers in use"}
        parts = ", ".join(f"{words} {_bytes(row[name])}" for name, words in named.items() if row[name])
        where = f"{row['devices']} devices" if row["devices"] > 1 else "1 device"
        yield Finding("memory in training", f"{kind}, {where}", None, f"{_bytes(row['total'])} per device: {parts}")
    kept, less = (numbers[f"activation_bytes_per_token{end}"] for end in ("", "_with_checkpointing"))
    yield Finding(
        "memory in training", "activations", None, f"about {_bytes(kept)} per token; {_bytes(less)} with checkpointing"
    )
    yield Finding(
        "memory in training", "logits", None, f"{_bytes(numbers['logits_bytes'])} (computed {chunk} tokens at a time)"
    )
    yield Finding("memory in rollout", "KV cache", None, f"{_bytes(numbers['kv_bytes_per_token'])} per token")


def _listing(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _count(number: int) -> str:
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return str(number)


def _bytes(number: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if number >= size:
            return f"{number / size:.1f} {unit}"
    return f"{number} bytes"
