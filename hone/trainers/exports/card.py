"""Model card of an export: README.md with base, data, algorithm, figures, version, and how to load it.

The header is what model hubs read. Paths of the machine that trained are shortened to their last part.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hone import __version__
from hone.composition import to_yaml
from hone.data.settings import DatasetConfig, PythonSettings, ReasoningGymSettings
from hone.models.files.packaged import PACKAGED, PREFIX
from hone.models.settings import ModelConfig
from hone.tracking.base import TrackingError, printable
from hone.tracking.trackers.jsonl import METRICS_FILE, read_metrics
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.supervised.settings import PreferenceRunConfig, RewardModelRunConfig, SupervisedConfig

LOG = logging.getLogger("hone")
CARD = "README.md"
TITLES = {
    "rl": "reinforcement learning",
    "distill": "distillation on the model's own samples",
    "sft": "supervised fine-tuning",
    "prefer": "preference optimisation",
    "reward_model": "a reward model",
}
HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
LOADING = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("FOLDER")
tokenizer = AutoTokenizer.from_pretrained("FOLDER")
```
"""
ADAPTER_LOADING = """```python
from peft import AutoPeftModelForCausalLM

model = AutoPeftModelForCausalLM.from_pretrained("FOLDER")
```
"""
VALUE_LOADING = "A run of hone uses it as `reward.components.NAME.model.path`.\n"


def write_card(export: Path, run: Path, config: PolicyRunConfig | SupervisedConfig, step: int | None = None) -> None:
    """Write the card of the run in folder `run` into an export, which is of `step`; None: of the last one."""
    adapter = (export / "adapter_config.json").is_file()
    header: dict[str, Any] = {"library_name": "peft" if adapter else "transformers"}
    base = _name(config.model)
    if (packaged := PACKAGED.get(base.removeprefix(PREFIX))) is not None and base.startswith(PREFIX):
        header |= {"license": packaged.licence, "base_model": packaged.hub}
    elif HUB_NAME.fullmatch(base) and not Path(base).exists():
        header["base_model"] = base
    if config.kind != "reward_model":
        header["pipeline_tag"] = "text-generation"
    header["tags"] = ["hone", config.kind]
    facts = "".join(f"| {name} | {_cell(value)} |\n" for name, value in _facts(config, step))
    loading = VALUE_LOADING if config.kind == "reward_model" else ADAPTER_LOADING if adapter else LOADING
    try:
        figures = "".join(_figures(run, step)) or "No held-out set was measured.\n"
    except TrackingError as error:  # no weights are lost for their card
        LOG.warning("the model card is without figures: %s", error)
        figures = f"{METRICS_FILE} of the run is damaged.\n"
    text = (
        f"---\n{to_yaml(header)}---\n\n# {run.resolve().name}\n\n"
        f"Trained by {TITLES[config.kind]} with hone {__version__}."
        f"\n\n| | |\n|---|---|\n{facts}\n## Held-out figures\n\n{figures}\n## Load it\n\n{loading}"
    )
    (export / CARD).write_text(printable(text), encoding="utf-8")


def _facts(config: PolicyRunConfig | SupervisedConfig, step: int | None) -> Iterator[tuple[str, str]]:
    yield "base", _name(config.model)
    yield "data", _data(config.data.train)
    yield "algorithm", _algorithm(config)
    if isinstance(config, PolicyRunConfig) and (taught := config.distillation) is not None:
        yield "teachers", ", ".join(f"{name}: {_name(one.model)}" for name, one in taught.teachers.items())
        use = f"loss {taught.loss.name} {taught.where.replace('_', ' the ')}, weight {taught.coef:g}"
        yield "distillation", f"{use}; task reward x {taught.task_coef:g}"
    if isinstance(config, PolicyRunConfig) and config.reward.components:
        yield "reward", ", ".join(f"{one.weight:g} x {name}" for name, one in config.reward.components.items())
    yield "steps", str(step if step is not None else config.run.steps or f"{config.run.epochs:g} epochs")
    yield "optimizer", f"{config.actor.optimizer.name}, learning rate {config.actor.optimizer.lr:g}"
    if config.actor.lora is not None:
        yield "adapter", f"LoRA of rank {config.actor.lora.rank}"
    yield "seed", str(config.run.seed)


def _algorithm(config: PolicyRunConfig | SupervisedConfig) -> str:
    if isinstance(config, PolicyRunConfig):
        chosen = config.algorithm
        kl = "" if chosen.kl is None else f", KL {chosen.kl.coef:g}"
        groups = f"{config.update.prompts_per_step} prompts x {config.update.samples_per_prompt} answers"
        return f"advantage {chosen.advantage.name}, loss {chosen.loss.name}{kl}; {groups} in a step"
    per_step = f"{config.samples_per_step} samples in a step"
    loss = config.loss.name if isinstance(config, PreferenceRunConfig | RewardModelRunConfig) else config.kind
    return f"loss {loss}; {per_step}"


def _name(model: ModelConfig) -> str:
    return "a model that the run built" if model.path is None else _short(model.path)


def _data(train: DatasetConfig) -> str:
    source, rows = train.source, train.path
    if isinstance(source, PythonSettings):
        rows = source.function
    elif isinstance(source, ReasoningGymSettings):
        rows = source.task
    return " ".join(filter(None, (_short(rows) if rows else "", f"({source.name})" if source is not None else "")))


def _short(path: str) -> str:
    """A path without the folders of this machine; an address without a password and a signature."""
    if "://" in path:
        return re.sub(r"(?<=://)[^/@]*@", "", path.partition("?")[0])
    return Path(path).name if Path(path).expanduser().is_absolute() else path


def _figures(run: Path, step: int | None) -> Iterator[str]:
    """The figures of the first evaluation and of the last one up to `step`, as a table."""
    lines = read_metrics(run) if (run / METRICS_FILE).is_file() else []
    measured = [
        {name: value for name, value in line.items() if name.startswith("eval/") or name == "step"}
        for line in lines
        if any(name.startswith("eval/") for name in line) and (step is None or line["step"] <= step)
    ]
    if not measured:
        return
    first, last = measured[0], measured[-1]
    yield f"| metric | step {first['step']:g} | step {last['step']:g} |\n|---|---|---|\n"
    for name in last:
        if name != "step":
            before = f"{first[name]:.4f}" if name in first else ""
            yield f"| {name.removeprefix('eval/')} | {before} | {last[name]:.4f} |\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
