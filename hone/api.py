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

import ast
import asyncio
import hashlib
import inspect
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from hone.cli.recipe import KINDS, MAPPING, load_run, run_file_of
from hone.cli.score import TIMEOUT_S, WORKERS, outcomes_of, scored
from hone.composition import COMMAND_LINE, ConfigError, Layer, read_layers, read_overrides
from hone.config import Loaded, build
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
SAVERS = ("save_to_disk", "save_pretrained")  # methods of data sets, and of models and tokenizers
FOLDER_KEYS = ("path", "tokenizer")  # of run files: those that name a folder themselves
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
        before = read_layers(Path(base)) if base else []
        after = [Layer(COMMAND_LINE, read_overrides(overrides))] if overrides else []
        folder = ""
        for layer in (*before, Layer(MAPPING, settings), *after):
            folder = (layer.data.get("run") or {}).get("dir") or folder
        return load_run([*before, Layer(MAPPING, _plain(settings, folder)), *after], MAPPING, kind)
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
    if isinstance(prompts, str):
        raise ConfigError(f"hone.generate takes a list of prompts, found one text; write [{prompts!r:.60}]")
    asked: list[Sequence[Message]] = [
        [Message(role="user", content=one)] if isinstance(one, str) else one for one in prompts
    ]
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
        reference = reward if isinstance(reward, str) else _reference(reward, Path(folder))
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


def _plain(value: Any, folder: str, of: str = "") -> Any:
    """Plain data: a function is replaced by its reference, a data set or a model by a folder in the run's `folder`.

    `of` is the key of the value. Where it is a section (`data.train`, `model`), the folder is its `path`.
    """
    if isinstance(value, Mapping):
        named = {key: _by_name(inner) if key == "components" else inner for key, inner in value.items()}
        return {key: _plain(inner, folder, key) for key, inner in named.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, folder) for inner in value]
    if isinstance(value, Path):
        return str(value)
    saves = next((name for name in SAVERS if not inspect.isclass(value) and hasattr(value, name)), "")
    if not (inspect.isfunction(value) or inspect.isclass(value) or saves):
        return value
    name = getattr(value, "__qualname__", type(value).__name__)
    if not folder:
        raise ConfigError(f"run.dir is required, because {name} is stored there")
    if not saves:
        return _reference(value, Path(folder))
    saved = _saved(value, saves, Path(folder))
    return saved if of in FOLDER_KEYS else {"path": saved}


def _by_name(components: Any) -> Any:
    """Rewards in a list (functions, or names), as components named after them."""
    if not isinstance(components, list | tuple):
        return components
    named = {getattr(one, "__name__", str(one)): {"reward": one} for one in components}
    if len(named) < len(components):
        raise ConfigError("reward.components: two rewards of the list have the same name; give a mapping instead")
    return named


def _saved(value: Any, saves: str, folder: Path) -> str:
    """The folder in `folder` of a data set, model or tokenizer. It is named by its content: another one is another."""
    partial = folder / "objects" / "partial"
    shutil.rmtree(partial, ignore_errors=True)  # of a call that was killed
    getattr(value, saves)(str(partial))
    digest = hashlib.sha256()
    for path in sorted(path for path in partial.rglob("*") if path.is_file()):
        digest.update(path.relative_to(partial).as_posix().encode() + path.read_bytes())
    target = partial.with_name(f"{type(value).__name__}-{digest.hexdigest()[:12]}")
    if target.is_dir():
        shutil.rmtree(partial)
    else:
        partial.rename(target)
    return str(target)


def _reference(function: Any, folder: Path) -> str:
    """`file.py:name` of a function, for the other processes that import it.

    A function of a script or a notebook is stored in a file of its own in `folder`, because importing a script would
    run it again: from a script with all imports and definitions around it, from a notebook alone.
    """
    name = function.__qualname__
    if "<" in name or "." in name:
        raise ConfigError(f"{name} cannot be found by other processes: define it at the top level of a file or cell")
    file = inspect.getsourcefile(function)
    if file is not None and os.path.isfile(file) and function.__module__ != "__main__":
        return f"{os.path.abspath(file)}:{name}"
    text = Path(file).read_text(encoding="utf-8") if file is not None and os.path.isfile(file) else ""
    source = _definitions(text, name) if text else inspect.getsource(function)
    target = folder / "functions" / f"{name}.py"
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(f"{source}\n", encoding="utf-8")
    return f"{target}:{name}"


def _definitions(script: str, function: str) -> str:
    """The imports, functions, classes and constants of a script, without what it does.

    Raises ConfigError if the function, or what it calls, reads a name that only the whole script gives a value.
    """
    tree = ast.parse(script)
    kinds = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    changed = {name for node in tree.body for name in _changed(node)}
    kept = [node for node in tree.body if isinstance(node, kinds) or _is_constant(node, changed) or _imports(node)]
    given = {name for node in kept if not isinstance(node, kinds) for name in _assigned(node)}
    rest = [node for node in tree.body if node not in kept]
    left = {name: node for node in rest for name in (*_changed(node), *_assigned(node)) if name not in given}
    named = {node.name: node for node in kept if isinstance(node, kinds[2:])}
    reached, waiting = set(), [function]
    while waiting:
        reached.add(found := waiting.pop())
        inside = list(ast.walk(named[found]))
        read = {one.id for one in inside if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}
        own = {one.arg for one in inside if isinstance(one, ast.arg)} | set(_assigned(named[found]))
        for name in sorted((read - own) & left.keys()):
            raise ConfigError(
                f"{found} reads {name}, which the script computes in line {left[name].lineno}; other processes import "
                f"{found} without running the script: move {name} into {found}, or both into a file of their own"
            )
        waiting += sorted((read & named.keys()) - reached)
    tree.body = kept
    return ast.unparse(tree)


def _imports(node: ast.stmt) -> bool:
    """Return whether a statement chooses between imports and does no more: `if TYPE_CHECKING`, `try: import x`."""
    inner = [one for one in ast.walk(node) if isinstance(one, ast.stmt) and one is not node]
    imports = all(isinstance(one, ast.Import | ast.ImportFrom | ast.Pass) or _is_constant(one, set()) for one in inner)
    return isinstance(node, ast.If | ast.Try) and imports


def _assigned(node: ast.stmt) -> Iterator[str]:
    """The names that a statement gives a value, also inside of a tuple, a loop or a branch."""
    return (one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store))


def _targets(node: ast.stmt) -> list[ast.expr]:
    return node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", ast.Constant(None))]


def _changed(node: ast.stmt) -> Iterator[str]:
    """The names whose value a statement changes: `settings["run"] = ...`, `count += 1`."""
    for target in _targets(node):
        inner: Any = target
        while isinstance(inner, ast.Subscript | ast.Attribute):
            inner = inner.value
        if isinstance(inner, ast.Name) and (inner is not target or isinstance(node, ast.AugAssign)):
            yield inner.id


def _is_constant(node: ast.stmt, changed: Set[str]) -> bool:
    """A plain value under a name, which the script does not change afterwards: without the change it would be wrong."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return False
    names = [one.id for one in _targets(node) if isinstance(one, ast.Name)]
    if not names or changed & set(names):
        return False
    return _is_plain(node.value)


PURE = frozenset({"re.compile", "set", "frozenset", "tuple", "list", "dict", "Path", "pathlib.Path"})


def _is_plain(value: ast.expr) -> bool:
    """Return whether to evaluate an expression costs and does nothing: literals, and calls of `PURE` with them."""
    if isinstance(value, ast.Call):
        arguments = [*value.args, *(one.value for one in value.keywords)]
        return ast.unparse(value.func) in PURE and all(map(_is_plain, arguments))
    if isinstance(value, ast.BinOp):
        return _is_plain(value.left) and _is_plain(value.right)
    try:
        ast.literal_eval(value)
    except ValueError:
        return ast.unparse(value).startswith("re.") and isinstance(value, ast.Attribute)  # flags: re.DOTALL
    return True
