"""`hone plan --calibrate`: time this machine on a run's shapes, and write the facts to the user's file of devices.

    the run's model with 1 and 3 layers x few and many tokens --> forward, training, optimizer, sync
                                        x few and many answers, short and long prompts --> prefill, decode, attention
    three steps of the run itself, with 1 layer and few prompts --> seconds of a sequence outside the models
    products and a copy --> operations and bytes per second

On a CPU seconds are the processor's over the number of threads, so that other programs do not count; on an accelerator
they are of the clock, after the device has ended its work. Each is the least of several.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoConfig

from hone.data.packing import Sample, pack_samples
from hone.engines.settings import EngineConfig, LoraConfig
from hone.models.building import save_model
from hone.models.files.progress_bars import without_progress_bars
from hone.models.loading import DTYPES, folder_of
from hone.models.numerics.products import prepare
from hone.models.settings import ModelConfig
from hone.models.vision.image_processor import save_language
from hone.models.vision.model import auto_class
from hone.planner.calibrated import PARTS, SEQUENCE, line, shape_of
from hone.planner.devices import known_devices, this_machine, write_user_file
from hone.planner.memory import Role
from hone.planner.roofline import Pass
from hone.platforms.base import compute_dtype, current_platform
from hone.rollout.adapters import AdapterKind
from hone.rollout.builtin.cache import COLUMN_STEP, rounded
from hone.rollout.builtin.engine import BuiltinEngine
from hone.rollout.settings import BuiltinSettings
from hone.trainers.forecast.changes import changed
from hone.trainers.forecast.setup import DevicePlacement, Models, step_sequences
from hone.trainers.forecast.sizes import POLICY, Sizes, models_of
from hone.trainers.policy.settings import PolicyRunConfig
from hone.trainers.run.context import RunControl
from hone.trainers.run.roles import frozen_engine
from hone.trainers.run.run_model import FOLDER, local_model
from hone.types import Batch, GenerationRequest, LossOutput, ModelOutput, SamplingParams
from hone.weights.in_process import sync
from hone.workers.train import TrainSpec, TrainWorker

LAYERS = (1, 3)
LISTS = ("layer_types", "layers_block_type", "mlp_layer_types")  # of a config: an entry for each layer
ROUNDS = 3
MOST_TOKENS = 4096  # of a timed micro-batch
SHORT, LONG = 4, 20  # tokens of timed answers
FARTHER = 128  # tokens of a longer prompt
FEW_ROWS, MOST_ROWS = 4, 64
MINI_PROMPTS, MINI_STEPS = 4, 3
OF_MODELS = ("perf/forward_s", "perf/backward_s", "perf/weight_sync_s", "perf/rollout_busy_seconds")  # of a step
Run = Callable[[Any, RunControl], Any]


def likelihood(output: ModelOutput, batch: Batch) -> LossOutput:
    """The negative log-likelihood, or a square of the values: the loss itself takes no time."""
    if output.logprobs is None:
        assert output.values is not None
        return LossOutput(output.values.square())
    return LossOutput(-output.logprobs)


def calibrate(config: Any, sizes: Sizes, run: Run, say: Callable[[str], None]) -> Path:
    """Time this machine on a run's shapes, and write the facts into the user's file of devices; returns the file.

    `run` trains settings. Raises ConfigError for an accelerator that no file describes.
    """
    alone = changed(config, {"runtime.backend": {"name": "local"}, "actor.backend": {"name": "fsdp2"}})
    torch.set_num_threads(alone.runtime.threads or torch.get_num_threads())
    machine = this_machine(known_devices(), alone.actor.compute_dtype)
    facts: dict[str, Mapping[str, Sequence[float]]] = {}
    with TemporaryDirectory(prefix="hone-calibrate-") as made:
        local = {name: local_model(one, Path(made) / name / FOLDER) for name, one in models_of(alone).items()}
        passes = Models(alone, sizes, DevicePlacement(machine)).passes()
        for one in passes:
            name = shape_of(one.role)
            if name in facts:
                continue
            say(f"timing {one.role.name}: {name}")
            engine = engine_of(alone, one.role.name)
            model = local.get(one.role.name, local[POLICY])
            facts[name] = _parts(alone, model, engine, one, round(sizes.lengths.sequence), Path(made))
        say("running three steps with one layer")
        policy = shape_of(passes[0].role)
        small = cut_model(local[POLICY], 1, Path(made) / "small")
        facts[policy] = {
            **facts[policy],
            f"{SEQUENCE} {alone.kind}": (_sequence_s(alone, small, run, Path(made)),),
        }
    operations = _operations_per_s(passes[0].role, DTYPES[compute_dtype(alone.actor.compute_dtype, current_platform())])
    before = machine.device.calibrated  # also of other kinds of run, whose shapes may be the same
    device = replace(
        machine.device,
        tflops=operations / 1e12,
        source=f"{current_platform().device_name()}, hone plan --calibrate on {datetime.now(UTC):%Y-%m-%d}",
        calibrated={**before, **{shape: {**before.get(shape, {}), **parts} for shape, parts in facts.items()}},
    )
    return write_user_file(device)


def engine_of(config: Any, role: str) -> EngineConfig:
    """The engine settings of a role; of one that is never trained the policy's, without its adapter."""
    if role == POLICY:
        return config.actor  # type: ignore[no-any-return]
    if role == "critic":
        return config.critic.engine  # type: ignore[no-any-return]
    if role == "process_reward":
        return config.process_reward.engine  # type: ignore[no-any-return]
    return frozen_engine(config.actor)


def cut_model(model: ModelConfig, layers: int, folder: Path) -> ModelConfig:
    """A model of the same shapes with so many layers and random weights, written to `folder`."""
    config = AutoConfig.from_pretrained(folder_of(model, weights=False), trust_remote_code=model.trust_remote_code)
    text = config.get_text_config()
    for name in LISTS:
        kinds = getattr(text, name, None)
        if isinstance(kinds, list) and len(kinds) == text.num_hidden_layers:
            setattr(text, name, kinds[:layers])
    text.num_hidden_layers = layers
    built = auto_class(config.model_type).from_config(config, dtype=DTYPES[model.dtype])
    folder.mkdir(parents=True)
    with without_progress_bars():
        save_model(built, folder)
    save_language(model, folder)
    return model.at(folder)


def _parts(
    config: Any, model: ModelConfig, engine: EngineConfig, one: Pass, mean: int, made: Path
) -> dict[str, Sequence[float]]:
    """The lines of a role's shape; `mean`: tokens of a sequence."""
    timings: dict[str, dict[tuple[int, int], float]] = {name: {} for name in PARTS}
    generates = isinstance(config, PolicyRunConfig) and one.role.name == POLICY
    for layers in sorted({min(one.role.anatomy.layers, count) for count in LAYERS}):
        cut = cut_model(model, layers, made / one.role.name / str(layers))
        kind = "value_model" if one.role.values else "language_model"
        worker = TrainWorker(TrainSpec(cut, engine, kind, total_steps=1000 if one.epochs else 0))
        worker.initialize()
        most = max(min(one.role.tokens, MOST_TOKENS, engine.token_limit), 2)
        length = max(min(mean, most // 4), 2)
        for tokens in (most // 4, most):
            _train(worker, _batch(tokens, length, one.role.anatomy.vocabulary), one, layers, timings)
        if generates:
            _generate(config, cut, worker, layers, timings)
    return {name: tuple(asdict(line(found)).values()) for name, found in timings.items() if found}


def _batch(tokens: int, length: int, vocabulary: int) -> Batch:
    count = max(tokens // length, 1)
    ids = torch.randint(3, max(vocabulary, 4), (count, length), generator=torch.Generator().manual_seed(0)).tolist()
    batch = pack_samples([Sample(tuple(row), (0,) + (1,) * (length - 1)) for row in ids])
    return batch.with_(loss_weights=torch.full((batch.num_tokens,), 1 / batch.num_tokens))


def _train(
    worker: TrainWorker, batch: Batch, one: Pass, layers: int, timings: dict[str, dict[tuple[int, int], float]]
) -> None:
    key = (layers, batch.num_tokens)
    needs: frozenset[Any] = frozenset() if one.role.values else frozenset({"entropy"})
    timings["forward"][key] = _seconds(lambda: worker.infer_batch(batch, needs))
    if not one.epochs:
        return
    engine = worker.engine
    with engine.train_mode():
        timings["training"][key] = _seconds(lambda: engine.forward_backward(batch, likelihood))
        engine.optimizer_step()
        if (layers, 1) in timings["optimizer"]:
            return  # its time does not depend on the tokens

        def update() -> None:
            with _uncounted():
                engine.forward_backward(batch, likelihood)
            engine.optimizer_step()

        timings["optimizer"][key[0], 1] = _seconds(update)


def _generate(
    config: PolicyRunConfig, cut: ModelConfig, worker: TrainWorker, layers: int, timings: dict[str, Any]
) -> None:
    """Time answers of two lengths, few and many at once: longer ones differ by their decode steps.

    Many are timed after a longer prompt, too: what a decode step takes more is for the columns of the KV cache. Prompts
    of these two timings are all the same, so that they are prefilled once: a decode step of the built-in engine reads
    each answer's own row of the cache. Experts see more kinds of tokens in unlike prompts, so no timing of these is
    compared with one of the same prompts. A model of few positions has shorter answers, and no longer prompt.
    """
    platform, settings = current_platform(), config.rollout.builtin
    dtype = compute_dtype(config.actor.compute_dtype, platform) if settings.dtype == "auto" else settings.dtype
    architecture = AutoConfig.from_pretrained(folder_of(cut, weights=False), trust_remote_code=cut.trust_remote_code)
    architecture.dtype = DTYPES[dtype]
    chosen: Any = dtype
    engine = BuiltinEngine(BuiltinSettings(dtype=chosen, slots=MOST_ROWS), architecture, device=platform.torch_device())
    timings["sync"][layers, 1] = _sync_s(config.actor.lora, worker, engine, DTYPES[dtype])
    vocabulary = architecture.get_text_config().vocab_size
    long = min(LONG, engine.longest // 2)
    steps = range(min(SHORT, long // 2), long)
    prompt = min(max(round(config.rollout.sampling.max_response_tokens / 2), 8), engine.longest - long)
    far = min(prompt + FARTHER, engine.longest - long)

    def times(rows: int, before: int, unlike: int) -> tuple[float, float]:
        """Seconds of a decode step, and of the prefill."""
        answer = partial(_answer, engine, vocabulary, rows, before, unlike)
        short_s, long_s = (_seconds(partial(answer, tokens)) for tokens in (steps.start, steps.stop))
        step_s = max((long_s - short_s) / len(steps), 0.0)
        return step_s, max(short_s - steps.start * step_s, 0.0)

    more, column = _columns(far, steps) - _columns(prompt, steps), 0.0
    if more:
        near_s, far_s = (times(MOST_ROWS, before, 0)[0] for before in (prompt, far))
        column = max(far_s - near_s, 0.0) / MOST_ROWS / more
    timings["attention"][layers, 1] = column
    for rows in (FEW_ROWS, MOST_ROWS):
        step_s, timings["prefill"][layers, rows * prompt] = times(rows, prompt, 7)
        timings["decode"][layers, rows] = max(step_s - column * rows * _columns(prompt, steps), 0.0)


def _sync_s(lora: LoraConfig | None, worker: TrainWorker, engine: BuiltinEngine, dtype: torch.dtype) -> float:
    """Seconds of a weight sync as a run has it: of all weights, or of an adapter once the engine has the base."""
    versions = iter(range(1, 100))

    def send() -> None:
        if lora is not None and lora.sync != "merged" and engine.has_base:
            stream, found = worker.engine.get_per_tensor_param(adapter_only=True)
            kind = found or {}
            if not engine.unfit_for_adapter(AdapterKind.of(kind, "")):
                asyncio.run(
                    sync(stream, lambda tensors, version: engine.update_adapter(tensors, kind, version), next(versions))
                )
                return
        asyncio.run(sync(worker.weights(dtype), engine.update_weights, next(versions)))

    return _seconds(send)


def _columns(prompt: int, steps: range) -> float:
    """Columns of the cache that a timed decode step reads for a row, on average."""
    return sum(rounded(prompt + done, COLUMN_STEP) for done in steps) / len(steps)


def _answer(engine: BuiltinEngine, vocabulary: int, rows: int, prompt: int, unlike: int, tokens: int) -> None:
    """Answer prompts of so many tokens; each begins `unlike` tokens after the one before it, 0: all are the same."""

    async def all_rows() -> None:
        sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
        prompts = [tuple((row * unlike + at) % vocabulary for at in range(prompt)) for row in range(rows)]
        asked = [GenerationRequest(str(row), one, sampling) for row, one in enumerate(prompts)]
        await asyncio.gather(*(engine.generate(one) for one in asked))

    asyncio.run(all_rows())


def _sequence_s(config: Any, model: ModelConfig, run: Run, made: Path) -> float:
    """Seconds of a sequence outside the models: processor time of a small run, minus the time of its models."""
    rl = isinstance(config, PolicyRunConfig)
    size = {"update.prompts_per_step": MINI_PROMPTS, "update.minibatches": 1} if rl else {"samples_per_step": 16}
    small: dict[str, Any] = {
        "model.build": None,
        "model.path": str(model.path),
        "run.dir": str(made / "run"),
        "run.steps": MINI_STEPS,
        "run.epochs": None,
        "evaluation.sets": {},
        "tracking.trackers": [{"name": "jsonl"}],
        **({"asynchrony": None, "rollout.builtin.process": "inside", "rollout.replicas": 1} if rl else {}),
        **size,
    }
    clock: list[tuple[float, float]] = []
    seconds: list[float] = []

    def on_step(step: int, values: Mapping[str, float]) -> None:
        clock.append((time.perf_counter(), time.process_time()))
        if len(clock) < 2 or "perf/step_s" not in values:
            return
        wall, busy = (after - before for before, after in zip(clock[-2], clock[-1], strict=True))
        models = sum(values.get(name, 0.0) for name in OF_MODELS)
        busy_share = min(busy / wall, 1.0) if current_platform().device == "cpu" else 1.0
        seconds.append(max(values["perf/step_s"] - models, 0.0) * busy_share)

    mini = changed(config, small)
    run(mini, RunControl(on_step=on_step))
    return min(seconds) / step_sequences(mini) if seconds else 0.0


_NOT_COUNTED: list[float] = []


@contextmanager
def _uncounted() -> Iterator[None]:
    """Leave a part of what `_seconds` times out."""
    begin = _now()
    yield
    _NOT_COUNTED.append(_now() - begin)


def _seconds(work: Callable[[], object]) -> float:
    """The least of several calls, after one that does not count."""
    work()
    found = []
    for _ in range(ROUNDS):
        _NOT_COUNTED.clear()
        begin = _now()
        work()
        found.append(_now() - begin - sum(_NOT_COUNTED))
    return max(min(found), 0.0)


def _now() -> float:
    platform = current_platform()
    if platform.device == "cpu":
        return time.process_time() / torch.get_num_threads()
    platform.synchronize()
    return time.perf_counter()


def _operations_per_s(role: Role, dtype: torch.dtype) -> float:
    """Operations per second of a matrix product: the tokens of a micro-batch times a matrix of the MLP."""
    device = current_platform().torch_device()
    prepare(dtype, str(device))
    tokens = min(role.tokens, MOST_TOKENS)
    a = torch.ones(tokens, role.anatomy.hidden, dtype=dtype, device=device)
    b = torch.ones(role.anatomy.hidden, max(role.anatomy.mlp, 1), dtype=dtype, device=device)
    return 2 * tokens * b.numel() / max(_seconds(lambda: torch.mm(a, b)), 1e-9)


__all__ = ["calibrate", "cut_model", "engine_of"]
