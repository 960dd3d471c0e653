"""The Python API: everything that `import hone` offers. What is not listed here is private and may change.

    import hone

    result = hone.train("run.yaml", "run.steps=100", on_step=lambda step, metrics: print(step, metrics["reward/mean"]))
    result.metrics[-1], result.model
    hone.generate(result.model, ["2 + 2 ="], temperature=0.0)

A run file may also be a mapping, which may contain functions, data sets of the library datasets, and models:

    hone.train({"defaults": "run.yaml", "reward": {"components": [my_function]}, "data": {"train": dataset}})

Functions of this module work inside a running event loop too, as in a notebook. Ctrl-C (a notebook's stop button) ends
a run after its step, saves it and raises `Interrupted`; the same call continues it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from hone.cli.recipe import KINDS, MAPPING, load_run, run_file_of
from hone.cli.score import TIMEOUT_S, WORKERS, outcomes_of, scored
from hone.composition import COMMAND_LINE, ConfigError, Layer, read_layers, read_overrides
from hone.config import Loaded, build
from hone.objects import plain, reference_to
from hone.registry import resolve
from hone.rewards.settings import RewardComponent, RewardConfig
from hone.rollout.settings import RolloutConfig, SamplingConfig
from hone.tracking.base import Interrupted as Interrupted
from hone.tracking.base import RolloutRecord
from hone.tracking.notebook import LiveChart, live_chart
from hone.tracking.table import MetricsTable
from hone.tracking.trackers.jsonl import ROLLOUTS_FILE, read_metrics, rollout_lines
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.run.context import RunControl
from hone.types import Message

R = TypeVar("R")
LOOK_S = 1.0  # between two looks at a call in another thread
RunFile = str | Path | Mapping[str, Any] | Loaded[Any]
"""Path of a run file, its content as a mapping, or what `load` returned."""
OnStep = Callable[[int, Mapping[str, float]], None]
"""Called after each step with its number and its metrics."""

# These import the models, so they are resolved after settings are checked.
_EVALUATION = "hone.trainers.policy.evaluate_model"
_ASKING = "hone.trainers.answering.asking"


@dataclass(frozen=True, slots=True)
class Result:
    """The run folder, and what the run wrote into it."""

    folder: Path

    @property
    def metrics(self) -> MetricsTable:
        """The metrics of each step, in order: `metrics[-1]`, `metrics.column("train/loss")`, `metrics.to_pandas()`."""
        return MetricsTable(read_metrics(self.folder))

    @property
    def rollouts(self) -> list[RolloutRecord]:
        """The trajectories that the run kept (`tracking.rollouts_per_step`), in order: prompt, response, reward ...

        `set` names the held-out set that a rollout belongs to; None: the rollout was for training.
        """
        path = self.folder / ROLLOUTS_FILE
        return [json.loads(line) for line in rollout_lines(path)] if path.is_file() else []

    @property
    def model(self) -> Path:
        """The trained model, as a Hugging Face folder."""
        return self.folder / "export"


def load(run_file: RunFile, *overrides: str, kind: str | None = None) -> Loaded[Any]:
    """Read and check the settings of a run: `.config` is the tree, `.provenance` says what set each key.

    `overrides` are `key=value` texts. Give `kind` if the file or mapping has no key `kind`. Raises ConfigError.
    """
    if isinstance(run_file, Loaded):
        return _of_kind(run_file, overrides, kind)
    if isinstance(run_file, Mapping):
        settings = dict(run_file)
        base = settings.pop("defaults", None)
        if not isinstance(base, str | Path | None):
            raise ConfigError(f"{MAPPING}: 'defaults' should name one run file, found {base!r:.60}; write its path")
        before = read_layers(Path(base)) if base else []
        after = [Layer(COMMAND_LINE, read_overrides(overrides))] if overrides else []
        folder = ""
        for layer in (*before, Layer(MAPPING, settings), *after):
            folder = (layer.data.get("run") or {}).get("dir") or folder
        return load_run([*before, Layer(MAPPING, plain(settings, folder)), *after], MAPPING, kind)
    return load_run(read_layers(Path(run_file), overrides), str(run_file), kind)


def train(run_file: RunFile, *overrides: str, on_step: OnStep | None = None) -> Result:
    """Train a policy with reinforcement learning, or continue the run in `run.dir`: `hone train`.

    After each step, hone calls `on_step(step, metrics)` in the thread that trains. Raises ConfigError for wrong
    settings, Interrupted if the run is stopped, and the error of a run that fails.
    """
    return _run("rl", run_file, overrides, on_step)


def distill(run_file: RunFile, *overrides: str, on_step: OnStep | None = None) -> Result:
    """Distil teachers into a policy, on its own answers: `hone distill`. Arguments and result as in `train`."""
    return _run("distill", run_file, overrides, on_step)


def sft(run_file: RunFile, *overrides: str, on_step: OnStep | None = None) -> Result:
    """Fine-tune a model on examples: `hone sft`. Arguments and result as in `train`."""
    return _run("sft", run_file, overrides, on_step)


def prefer(run_file: RunFile, *overrides: str, on_step: OnStep | None = None) -> Result:
    """Train a model on preferences (DPO and its family, KTO): `hone prefer`. Arguments and result as in `train`."""
    return _run("prefer", run_file, overrides, on_step)


def reward_model(run_file: RunFile, *overrides: str, on_step: OnStep | None = None) -> Result:
    """Train a reward model: `hone reward-model`. Arguments and result as in `train`."""
    return _run("reward_model", run_file, overrides, on_step)


def evaluate(run_file: RunFile, *overrides: str, model: str | Path = "") -> dict[str, float]:
    """Measure a model on the held-out sets of a run file of kind rl or distill: `{"eval/<set>/...": value}`.

    `run_file` may also be a run folder. `model` is a folder or hub name; without it, the run's export is measured.
    """
    if isinstance(run_file, str | Path):
        run_file, given = run_file_of(Path(run_file), overrides)
        overrides = tuple(given)
    config = load(run_file, *overrides).config
    if not isinstance(config, PolicyRunConfig):
        raise ConfigError(f"a run file of kind {config.kind} has no evaluation sets of prompts; give one of kind rl")
    folder = Path(model or Path(config.run.dir) / "export")
    evaluate_model = resolve(f"{_EVALUATION}:evaluate_model")
    found: dict[str, float] = _answered(lambda: evaluate_model(config, config.model.at(folder)))
    return found


def generate(
    model: str | Path,
    prompts: Sequence[str | Sequence[Message]],
    *,
    samples: int = 1,
    temperature: float = 1.0,
    max_response_tokens: int = 512,
    seed: int = 0,
) -> list[list[str]]:
    """Generate `samples` answers to each prompt (a text or a conversation) with the built-in engine.

    `model` is a folder, GGUF file or hub name, or the folder of a run. `temperature` 0 is greedy.
    """
    asked = _conversations(prompts)
    sampling = SamplingConfig(max_response_tokens=max_response_tokens, temperature=temperature)
    how = resolve("hone.trainers.answering.model:Answering")(RolloutConfig(sampling=sampling))
    chosen = resolve("hone.trainers.answering.model:finished_model")(str(model))
    request = resolve(f"{_ASKING}:AnswerRequest")(asked, how, samples, seed)
    generate_answers = resolve(f"{_ASKING}:generate_answers")
    found: list[list[str]] = _answered(lambda: generate_answers(chosen, request))
    return found


def score(
    reward: str | Callable[..., Any],
    rows: Sequence[Mapping[str, Any]],
    *,
    options: Mapping[str, Any] | None = None,
    workers: int = WORKERS,
    timeout_s: float = TIMEOUT_S,
) -> list[dict[str, Any]]:
    """Score the `response` of each row against its `ground_truth`. Returns the rows with `reward` and `components`.

    `reward` is a registered name, 'file.py:function', or a function. If it fails for a row, the row has an `error`.
    """
    with TemporaryDirectory(prefix="hone-score-") as folder:
        reference = reward if isinstance(reward, str) else reference_to(reward, Path(folder))
        given = {"reward": reference, "options": dict(options or {}), "timeout_s": timeout_s}
        component = build(RewardComponent, given, source="hone.score")
        settings = RewardConfig(components={"reward": component}, workers=workers)
        found = outcomes_of(settings, rows, show=False)
    return [scored(row, "reward", outcome) for row, outcome in zip(rows, found, strict=True)]


# ------------------------------------------------------------------------------------------------------------ inside


def _of_kind(loaded: Loaded[Any], overrides: Sequence[str], kind: str | None) -> Loaded[Any]:
    if overrides:
        raise ConfigError(f"these settings are loaded already; give {overrides[0]} to hone.load")
    if kind not in (None, loaded.config.kind):
        raise ConfigError(f"these settings have kind: {loaded.config.kind}, expected {kind}")
    return loaded


def _run(kind: str, run_file: RunFile, overrides: Sequence[str], on_step: OnStep | None) -> Result:
    loaded = load(run_file, *overrides, kind=kind)
    chart = live_chart(Path(loaded.config.run.dir))
    control = RunControl(on_step if chart is None else chart.following(on_step))
    return Result(_answered(lambda: resolve(KINDS[kind].run)(loaded, control), control, chart))


def _conversations(prompts: Any) -> list[Sequence[Message]]:
    """Each prompt as a conversation. Raises ConfigError for one prompt without a list around it, and for no prompt."""
    if isinstance(prompts, str):
        raise ConfigError(f"hone.generate takes a list of prompts, found one text; write [{prompts!r:.60}]")
    if isinstance(prompts, Mapping):
        raise ConfigError("hone.generate takes a list of prompts, found one message; write [[message]]")
    if not isinstance(prompts, Iterable):
        raise ConfigError(f"hone.generate takes a list of prompts, found {prompts!r:.60}; write ['a text']")
    asked: list[Sequence[Message]] = []
    for number, one in enumerate(prompts):
        if isinstance(one, Mapping):
            raise ConfigError(f"prompt {number} is one message, expected a conversation; write [messages] for one")
        whole = [Message(role="user", content=one)] if isinstance(one, str) else one
        if not (isinstance(whole, Sequence) and whole and all(isinstance(part, Mapping) for part in whole)):
            raise ConfigError(
                f"prompt {number} should be a text, or a conversation such as [{{'role': 'user', 'content': 'a text'}}]"
                f", found {one!r:.60}"
            )
        asked.append(whole)
    return asked


def _answered(call: Callable[[], R], control: RunControl | None = None, chart: LiveChart | None = None) -> R:
    """The result of `call`, which runs event loops of its own: in another thread, if this one has a running loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return call()
    with ThreadPoolExecutor(1, "hone") as thread:
        answer = thread.submit(call)
        try:
            return _ended(answer, chart)
        except KeyboardInterrupt:
            if control is not None:
                control.stop.set()
            return _ended(answer, chart)  # Interrupted, after the step has ended and is saved


def _ended(answer: Future[R], chart: LiveChart | None = None) -> R:
    """The result of a call, which has deadlines of its own; a wait without one would not notice an interrupt."""
    while not wait([answer], LOOK_S).done:
        if chart is not None:
            chart.draw()
    if chart is not None:
        chart.draw()
    return answer.result(0)
