"""Runs for the table of all model types: one verdict of `hone doctor --model`, and one cell for each column.

tiny model of a type --> doctor's sentences
                     --> start of an engine: refused, with a sentence; or each column of `COLUMNS`
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hone.cli.model_doctor import model_report
from hone.data.packing import Sample, pack_samples, select
from hone.engines.fsdp2.engine import Fsdp2Engine
from hone.engines.settings import MoeConfig, OptimizerConfig
from hone.models.attention.indexed import indexers
from hone.models.errors import ModelError
from hone.models.routing import Routers, Routing, expert_count, watched
from hone.types import Batch, LossOutput
from tests.families import checks
from tests.families.types import VOCABULARY, save_tiny

ALONE = (23, 9, 31, 14, 2)
ANSWERS = (5, 17, 3)  # to one question of 8 tokens, which the row holds once
QUESTION = 8  # a window, a chunk and a choice of 6 keys end inside it and go on in the answers
STEADY = 0.03  # of the norm
UNSTEADY = 0.3  # of the norm, where rounding moves tokens to other experts or keys
RESULTS = Path(__file__).with_name("every.json")


def make_batch() -> Batch:
    generator = torch.Generator().manual_seed(0)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, VOCABULARY, (count,), generator=generator).tolist())

    samples = [Sample(tokens(count), (0,) + (1,) * (count - 1)) for count in ALONE]
    question = tokens(QUESTION)
    samples += [Sample(question + tokens(count), (0,) * QUESTION + (1,) * count) for count in ANSWERS]
    batch = pack_samples(samples).with_(group_index=torch.tensor([0, 1, 2, 3, 4, 5, 5, 5]))
    return batch.with_(loss_weights=torch.full((batch.num_tokens,), 1 / int(batch.loss_mask.sum())))


@dataclass(frozen=True)
class Reference:
    """Results of transformers' own forward of each sequence alone."""

    logprobs: Tensor  # [T], 0 where there is no loss
    gradients: Tensor  # of the loss, of the weights that get any, end to end in float32
    names: list[str]  # of these weights
    routes: Tensor | None  # [T, layers, top_k]; None: it has no experts, or hone cannot replay them
    unsteady: bool  # rounding may choose other experts or keys, and they cannot be replayed


def reference(folder: Path, batch: Batch, dtype: torch.dtype, routes: Tensor | None = None) -> Reference:
    """Run transformers' own forward in `dtype`; `routes` replaces the experts that it chooses."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=dtype).eval()
    found, count = torch.zeros(batch.num_tokens), int(batch.loss_mask.sum())
    routers = _routers(model)
    chosen = []
    for index in range(batch.num_sequences):
        one = select(batch, [index])
        tokens = slice(int(batch.cu_seqlens[index]), int(batch.cu_seqlens[index + 1]))
        routing = None if routers is None else Routing(routers, None if routes is None else routes[tokens])
        with watched(routing):
            logits = model(one.token_ids[None], use_cache=False).logits[0].float()
        chosen += [] if routing is None else [routing.choices()]
        scores = torch.log_softmax(logits[:-1], -1).gather(1, one.token_ids[1:, None])[:, 0]
        (-torch.where(one.loss_mask[1:], scores, 0).sum() / count).backward()
        found[tokens.start + 1 : tokens.stop] = scores.detach()
    with_gradient = {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}
    whole = torch.cat([grad.float().flatten() for grad in with_gradient.values()])
    unsteady = bool(indexers(model)) or (routers is None and expert_count(model.config) > 0)
    return Reference(
        torch.where(batch.loss_mask, found, 0), whole, [*with_gradient], torch.cat(chosen) if chosen else None, unsteady
    )


def _routers(model: Any) -> Routers | None:
    """The routers whose choices can be replayed."""
    tokens = torch.arange(3, 14)[None]
    try:
        routers = Routers.find(model)
        if routers is not None:
            routers.check(lambda: model(tokens, use_cache=False), "it")
    except ModelError:
        return None
    return routers


def engine_of(folder: Path, dtype: str, replay: bool = False) -> Fsdp2Engine:
    return checks.make_engine(
        folder,
        compute_dtype=dtype,
        max_tokens_per_microbatch=256,
        optimizer=OptimizerConfig(name="SGD", lr=1e-3),
        moe=MoeConfig(routing_replay="rollout" if replay else "none"),
    )


def packed(folder: Path) -> None:
    """Log-probs and gradients of a packed row with a shared prefix are those of each sequence alone."""
    exact = reference(folder, make_batch(), torch.float32)
    found, ours = _by_hone(folder, "float32", exact.names, None)
    checks.require_close(found, exact.logprobs, "log-probs")
    off = float((ours - exact.gradients).norm() / exact.gradients.norm())
    assert off <= 1e-3, f"gradients differ by {off:.2g} of their norm"


def packed_in_bfloat16(folder: Path) -> None:
    """In bfloat16 they are at most twice as far from float32 as each sequence alone in bfloat16.

    All three use the experts that the float32 model chooses. Where they cannot be replayed, see `UNSTEADY`.
    """
    exact = reference(folder, make_batch(), torch.float32)
    alone = reference(folder, make_batch(), torch.bfloat16, exact.routes)
    found, ours = _by_hone(folder, "bfloat16", exact.names, exact.routes)
    for what, one, other, true in (
        ("log-probs", found, alone.logprobs, exact.logprobs),
        ("gradients", ours, alone.gradients, exact.gradients),
    ):
        off, rounding = (float((x - true).norm() / true.norm()) for x in (one, other))
        assert off <= max(2 * rounding, UNSTEADY if exact.unsteady else STEADY), (
            f"{what} of the packed row differ from float32 by {off:.2g}, of each sequence alone by {rounding:.2g}"
        )


def _by_hone(folder: Path, dtype: str, names: Sequence[str], routes: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log-probs of the packed batch, and the gradients of these weights, end to end."""
    batch, engine = make_batch().with_(routed_experts=routes), engine_of(folder, dtype, routes is not None)
    found = engine.infer_batch(batch).logprobs
    assert found is not None
    with engine.train_mode():
        engine.forward_backward(batch, lambda output, part: LossOutput(-output.logprobs))
    weights = dict(engine.weights.masters)
    gradients = [weights[name].grad if weights[name].grad is not None else weights[name] * 0 for name in names]
    return found, torch.cat([one.float().flatten() for one in gradients if one is not None])


COLUMNS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "packed": ("packed", packed),
    "bfloat16": ("in bfloat16", packed_in_bfloat16),
    "builtin": ("built-in rollout", checks.built_in_rollout),
    "lora": ("LoRA", checks.lora),
}
DOCTOR, RUN = "doctor", "run"  # cells besides: the reason for a refusal, or nothing


def answers(folder: Path) -> dict[str, str]:
    """Reasons of `hone doctor --model` and of an engine that starts, for refusing a model; empty: accepted."""
    try:
        found = {one.name: one for one in model_report(str(folder), None, 1, 8).facts}
        fact = found["packed attention"]
        doctor = "" if fact.ok else fact.detail
    except ModelError as error:
        doctor = str(error)
    try:
        engine_of(folder, "float32")
    except ModelError as error:
        return {DOCTOR: _reason(doctor), RUN: _reason(str(error))}
    return {DOCTOR: _reason(doctor), RUN: ""}


def _reason(text: str) -> str:
    """A refusal without the folder, and without figures that another machine rounds differently."""
    text = re.sub(r"^(model\.path )?'?/\S+/m'?( \([\w-]+\))?:? ", "", text.splitlines()[0] if text else "")
    for prefix in ("cannot be trained: ", "cannot be built by transformers: ", "cannot be loaded: "):
        text = text.removeprefix(prefix)
    return re.sub(r"changes by \S+ \(of \S+\)", "changes", text)


def row(kind: str, columns: Iterable[str] = COLUMNS) -> dict[str, str]:
    """All cells of one model type."""
    with tempfile.TemporaryDirectory() as path:
        folder = save_tiny(kind, Path(path) / "m")
        found = answers(folder)
        for column in columns if not found[RUN] else ():
            try:
                COLUMNS[column][1](folder)
                found[column] = checks.YES
            except (AssertionError, ValueError, NotImplementedError) as error:
                found[column] = _reason(str(error).replace(str(folder), "the model"))
    return found


def read() -> dict[str, dict[str, str]]:
    rows: dict[str, dict[str, str]] = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.is_file() else {}
    return rows


def page(rows: Mapping[str, Mapping[str, str]]) -> str:
    """The table of accepted types in Markdown, and below it the refused ones by reason."""
    headings = [heading for heading, _ in COLUMNS.values()]
    lines = ["| `model_type` | " + " | ".join(headings) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    notes: list[str] = []
    refused: dict[str, list[str]] = {}
    for kind, cells in sorted(rows.items()):
        if cells[RUN]:
            refused.setdefault(cells[DOCTOR] or cells[RUN], []).append(f"`{kind}`")
            continue
        texts = []
        for column in COLUMNS:
            cell = cells.get(column, "not run")
            if cell not in (checks.YES, "not run"):
                if cell not in notes:
                    notes.append(cell)
                cell = f"no ({notes.index(cell) + 1})"
            texts.append(cell)
        lines.append(f"| `{kind}` | " + " | ".join(texts) + " |")
    lines += ["", *(f"{number}. {note}" for number, note in enumerate(notes, 1)), ""] if notes else [""]
    lines += ["| refused, with this reason | `model_type` |", "|---|---|"]
    lines += [f"| {reason} | {', '.join(kinds)} |" for reason, kinds in sorted(refused.items())]
    return "\n".join(lines)
