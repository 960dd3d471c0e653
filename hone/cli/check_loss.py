"""`hone check-loss BATCH.safetensors RUN.yaml`: hone's loss and gradient norm on a batch that another system saved.

    tensors by name, padded as verl and TRL pad --> Batch, packed --> loss weights of the run file --> engine
                                                --> loss, gradient norm, means of the loss's metrics

Nothing is written, and the model's files stay as they are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hone.algorithms.objective import SftObjective
from hone.cli.recipe import load_recipe
from hone.config import ConfigError
from hone.data.packing import Sample, pack_samples
from hone.engines.settings import EngineConfig
from hone.planner.anatomy import examine
from hone.registry import unknown
from hone.trainers.policy.checks import algorithm_of, check_settings
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.run.roles import prepare_process
from hone.trainers.run.run_model import FOLDER, local_model
from hone.trainers.supervised.trainer import weighed
from hone.types import Batch, LossFn
from hone.workers.train import TrainSpec, TrainWorker

IDS, MASK, LEARNT = "input_ids", "attention_mask", "loss_mask"
PER_TOKEN = ("old_logprobs", "ref_logprobs", "rollout_logprobs", "advantages", "values", "returns")
PER_SEQUENCE = ("rewards", "group")
OTHERS = {  # names of verl and TRL -> hone's
    "response_mask": LEARNT,
    "completion_mask": LEARNT,
    "old_log_probs": "old_logprobs",
    "old_per_token_logps": "old_logprobs",
    "ref_log_prob": "ref_logprobs",
    "ref_per_token_logps": "ref_logprobs",
    "rollout_log_probs": "rollout_logprobs",
    "sampling_per_token_logps": "rollout_logprobs",
}
PARTS = ("prompt_ids", "prompt_mask", "completion_ids")  # TRL: two blocks, one after the other
IGNORED = ("position_ids", "responses", "prompts")  # of verl: all of it is in `input_ids`
KNOWN = (IDS, MASK, LEARNT, *PER_TOKEN, *PER_SEQUENCE, *OTHERS, *PARTS, *IGNORED)


def check_loss(
    batch: Annotated[Path, typer.Argument(help="tensors of one optimizer step (.safetensors)")],
    recipe: Annotated[Path, typer.Argument(help="run file (YAML) of kind rl or sft")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value settings")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Compute hone's loss and gradient norm on a saved batch, to compare with the system that saved it.

    The loss is that of the run file's algorithm on the run file's model, in one optimizer step. Give advantages, or
    rewards from which the run file's estimator computes them.
    """
    config = load_recipe(recipe, overrides or []).config
    prepare_process(config.runtime)
    with TemporaryDirectory(prefix="hone-check-loss-") as folder:
        found = loss_of(config, read_batch(batch), Path(folder))
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        typer.echo(f"{name:36} {value:.10g}")


def read_batch(path: Path) -> Batch:
    """Read a padded batch. Raises ConfigError for tensors that are missing, unknown, or of another size."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  a file, not a dict
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: {error}") from error
    for name in tensors:
        if name not in KNOWN:
            raise ConfigError(f"{path}: {unknown('tensor', name, list(KNOWN))}")
    tensors = _joined(tensors, path)
    ids, mask = tensors[IDS], tensors.get(MASK, torch.ones_like(tensors[IDS])).bool()
    if ids.dim() != 2 or mask.shape != ids.shape:
        raise ConfigError(f"{path}: {IDS} is {list(ids.shape)} and {MASK} {list(mask.shape)}; expected [N, L] of both")
    learnt = _wide(LEARNT, tensors[LEARNT], ids, path).bool() & mask
    samples = [
        Sample(tuple(row[kept].tolist()), tuple(one[kept].long().tolist()))
        for row, kept, one in zip(ids, mask, learnt, strict=True)
    ]
    try:
        packed = pack_samples(samples)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error
    fields: dict[str, Any] = {}
    for name in PER_TOKEN:
        if name in tensors:
            fields[name] = _wide(name, tensors[name], ids, path)[mask].float()
    if "rewards" in tensors:
        fields["rewards"] = _of_sequences("rewards", tensors, len(ids), path).float()
    if "group" in tensors:
        fields["group_index"] = _of_sequences("group", tensors, len(ids), path).long()
    return packed.with_(**fields)


def _joined(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """The tensors under hone's names, TRL's blocks of prompts and completions as one."""
    found: dict[str, Tensor] = {}
    for name, one in tensors.items():
        if name not in PARTS:
            own = OTHERS.get(name, name)
            if own in found:
                raise ConfigError(f"{path}: {name} is another name of {own}, which is there too; keep one of them")
            found[own] = one
    if IDS not in found and "completion_ids" in tensors:
        prompt, completion = tensors.get("prompt_ids"), tensors["completion_ids"]
        if prompt is None or LEARNT not in found:
            raise ConfigError(f"{path}: completion_ids needs prompt_ids and completion_mask too")
        before = tensors.get("prompt_mask", torch.ones_like(prompt))
        shapes = [list(one.shape) for one in (prompt, before, completion, found[LEARNT])]
        rows = {one[0] if len(one) == 2 else -1 for one in shapes}
        if -1 in rows or len(rows) > 1 or shapes[0] != shapes[1] or shapes[2] != shapes[3]:
            raise ConfigError(
                f"{path}: prompt_ids, prompt_mask, completion_ids and completion_mask are {shapes}; expected "
                "[N, P], [N, P], [N, R] and [N, R]: a row for each completion"
            )
        found[IDS] = torch.cat([prompt, completion], 1)
        found[MASK] = torch.cat([before.long(), found[LEARNT].long()], 1)
    missing = [name for name in (IDS, LEARNT) if name not in found]
    if missing:
        raise ConfigError(f"{path} has no {' and no '.join(missing)}; it has {', '.join(sorted(tensors))}")
    return found


def _wide(name: str, values: Tensor, ids: Tensor, path: Path) -> Tensor:
    """Values for each token, [N, L], from [N, L], from [N, R] of the last R tokens, or from [N] of whole sequences."""
    rows, width = ids.shape
    if values.dim() == 1 and values.shape[0] == rows:
        return values[:, None].expand(rows, width)
    if values.dim() != 2 or values.shape[0] != rows or values.shape[1] > width:
        raise ConfigError(
            f"{path}: {name} is {list(values.shape)}; expected [{rows}, {width}], the last columns of it, or [{rows}]"
        )
    return torch.nn.functional.pad(values, (width - values.shape[1], 0))


def _of_sequences(name: str, tensors: Mapping[str, Tensor], rows: int, path: Path) -> Tensor:
    values = tensors[name]
    if values.shape != (rows,):
        raise ConfigError(f"{path}: {name} is {list(values.shape)}; expected [{rows}]: one for each sequence")
    return values


def loss_of(config: Any, batch: Batch, folder: Path) -> dict[str, float]:
    """Loss and gradient norm of a run's policy on a batch, and the means of the loss's metrics.

    Raises ConfigError for a kind of run whose batch is not of this form, and for fields that the loss needs.
    """
    loss: LossFn
    try:
        if isinstance(config, PolicyRunConfig):
            check_settings(config)
            algorithm = algorithm_of(config)
            if batch.advantages is None and batch.rewards is None:
                raise ConfigError("the batch has neither advantages nor rewards; add one of them")
            if batch.advantages is None:
                batch = algorithm.advantages(batch)
            batch, loss = algorithm.weigh(batch), algorithm.policy_objective()
        elif config.kind == "sft":
            batch, loss = weighed(batch, config.aggregation), SftObjective()
        else:
            raise ConfigError(f"kind {config.kind}: hone check-loss is for kinds rl and sft")
        engine: EngineConfig = config.actor.model_copy(
            update={"max_grad_norm": None, "max_tokens_per_microbatch": max(batch.num_tokens, 1)}
        )
        temperature = config.rollout.sampling.temperature or 1.0 if isinstance(config, PolicyRunConfig) else 1.0
        model = local_model(config.model, folder / FOLDER)
        largest, known = int(batch.token_ids.max()), examine(model).vocabulary
        if largest >= known:
            raise ConfigError(
                f"token id {largest} is in the batch, and the model has {known}: give the batch's own model"
            )
        spec = TrainSpec(model, engine, temperature=temperature, total_steps=1)
        worker = TrainWorker(spec)
        worker.initialize()
        with worker.engine.train_mode():
            metrics = worker.engine.forward_backward(batch, loss) | worker.engine.optimizer_step()
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(str(error)) from error
    shown = {name: metric.value for name, metric in sorted(metrics.items())}
    first = {
        "loss": shown.pop("train/loss"),
        "gradient norm": shown.pop("train/grad_norm", float("nan")),
        "tokens with a loss": float(batch.loss_mask.sum()),
        "sequences": float(batch.num_sequences),
    }
    return {**first, **{name: value for name, value in shown.items() if not name.startswith("train/lr")}}


__all__ = ["check_loss", "loss_of", "read_batch"]
