"""Runs the GPU kit: stages with a time limit each, most informative first, and one line of JSON for each.

    python benchmarks/gpu_kit/stages.py --out OUT                      every stage
    python benchmarks/gpu_kit/stages.py --out OUT first                a plan for six minutes; then `second`
    python benchmarks/gpu_kit/stages.py --out OUT doctor tests         these; `tests` stands for every `tests-...`
    python benchmarks/gpu_kit/stages.py --out OUT --rehearse           every stage on a CPU, as small as possible

`OUT` gets two files. `results.jsonl` has a line for each stage as soon as it ends: its name, whether it succeeded, its
seconds, its figures, and the end of its output. `output.log` has the output of all stages, of each at most its last
MiB. Models and runs are in a temporary folder. A stage that runs over its limit is killed with everything that it
started, and the next one begins. Stages of tests that follow each other share the device; whatever is measured has it
alone. The exit code is the number of stages that failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import groupby
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PYTHON = sys.executable
PEER = ROOT / ".venv-bench/bin/python"  # TRL's environment for `make bench`, if it is there
TAIL_LINES = 25
OUTPUT_BYTES = 1 << 20  # of one stage, that `output.log` keeps
TOP_KERNELS = 25
TRITON = "tests/engines/test_triton_scores.py"  # on a CPU by `make test-triton`
TESTS = {  # each in a process of its own: an error of a device spoils every later use of it by the same process
    "tests/models/test_attention.py": 90,
    "tests/models/test_varlen_attention.py": 60,
    "tests/models/test_fused_norm.py": 30,
    "tests/engines/test_logprobs.py": 60,
    "tests/engines/test_device.py": 120,
    "tests/rollout/test_device.py": 120,
    "tests/rollout/test_graphs.py": 90,
    "tests/weights/test_device.py": 90,
    TRITON: 120,
    "tests/trainers/test_resume.py": 240,
    "tests/models/test_flex_attention.py": 180,
    "tests/platforms/test_platforms.py": 60,
    "tests/rollout/test_ragged_cache.py": 60,  # skips before torch 2.13
}
SMALL = {  # what a rehearsal changes
    "sft": ("samples_per_step=2", "run.steps=3", "runtime.threads=1"),
    "grpo": (
        *("update.prompts_per_step=2", "update.samples_per_prompt=2", "rollout.sampling.max_response_tokens=8"),
        *("run.steps=3", "runtime.threads=1"),
    ),
    "decode": ("--rows", "1,4", "--short", "4", "--long", "8", "--rounds", "1", "--copy-mib", "16"),
    "trl": ("--max-tokens", "8", "--rounds", "1", "--batch", "64"),
    "head": ("--rows", "64", "--width", "64", "--tokens", "4096", "--rounds", "1"),
    "weight-sync": ("--gb", "0.07", "--rounds", "1", "--device", "cpu"),
    "quickstart": ("run.steps=1", "evaluation.every_steps=0"),
    "reverse": ("run.steps=1", "evaluation.every_steps=0"),
}
GAP = "correction/mean_abs_difference"  # of log-probs
WARM_UP_STEPS = 2  # of a run that is measured
PEAKS = {  # of a card, whose name contains the key: dense bfloat16 FLOP/s, from the vendor's data sheets
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
}
PLANS = {  # for a machine that is there for a quarter of an hour: what to run first, and what when that works
    "first": (
        *("doctor", "tests", "grpo-0.6b", "sft-0.6b", "decode-0.6b", "weight-sync", "sft-1.7b", "grpo-1.7b"),
        *("decode-1.7b", "hybrid", "reverse"),
    ),
    "second": (
        *("trl-0.6b", "sft-4b", "profile-0.6b", "sleep-0.6b", "qlora-1.7b", "offload-1.7b", "long-0.6b", "trl-1.7b"),
        *("ungraphed-0.6b", "head", "quickstart"),
    ),
}
VARIANTS = {  # of the run of SFT or GRPO with a shape: the algorithm, its data, and the keys that differ
    "sft": ("sft", "samples", ()),
    "grpo": ("grpo", "prompts", ()),
    "profile": ("grpo", "prompts", ("rollout.sampling.max_response_tokens=64", "run.steps=3", "profile.steps=3")),
    "sleep": ("grpo", "prompts", ("rollout.sleep_while_training=level_2",)),
    "hybrid": ("grpo", "prompts", ("rollout.sampling.max_response_tokens=128",)),
    "offload": ("grpo", "prompts", ("actor.backend.offload=true", "actor.activation_checkpointing=offload")),
    "qlora": ("sft", "samples", ("actor.lora={rank: 16, quantise: {}}", "actor.activation_checkpointing=true")),
    "long": ("sft", "long", ("samples_per_step=8", "actor.activation_checkpointing=true")),
}
TEST_CORES = 2  # that a process of tests keeps busy

Figures = Mapping[str, Any]


@dataclass(frozen=True)
class Stage:
    """One measurement: a command, its limit in seconds, and what its output or its run folder says."""

    name: str
    command: Sequence[str]
    limit_s: float
    figures: Callable[[str], Figures] = field(default=lambda output: {})


def hone(*arguments: str) -> list[str]:
    return [PYTHON, "-m", "hone", *arguments]


# ------------------------------------------------------------------------------------------------------- figures


def count_tests(output: str) -> Figures:
    """Count tests by their end, also where the run was cut, and list those that failed."""
    found = re.findall(r"^(\S+::.*?) (PASSED|FAILED|SKIPPED|ERROR)\b", output, re.MULTILINE)
    counts = dict(Counter(outcome.lower() for _, outcome in found))
    failed = [name for name, outcome in found if outcome in ("FAILED", "ERROR")]
    return {**counts, "failures": failed} if failed else counts


def count_checks(output: str) -> Figures:
    """Count the checks of `hone doctor --conformance` by their end, and list the faults of those that failed."""
    begin = output.find("{\n")
    if begin < 0:
        return {}
    results = json.JSONDecoder().raw_decode(output[begin:])[0]["results"]
    counts = dict(Counter(one["status"] for one in results))
    failed = {f"{one['section']}: {one['name']}": one["reason"] for one in results if one["status"] == "fails"}
    return {**counts, "failures": failed} if failed else counts


def exact_match(output: str) -> Figures:
    found = re.findall(r"exact match ([\d.]+)", output)
    return {"exact_match": float(found[-1])} if found else {}


def step_figures(run: Path, parameters: int, output: str) -> Figures:
    """Medians over the steps after the first two of what the run wrote down: `perf/*`, and MFU of an update.

    The gap between rollout and trainer is among them. An update is the phase `backward`; generation, rewards and the
    weight sync are not part of it. MFU is that of a card in `PEAKS`. `parameters` is 0 where the arithmetic of MFU does
    not hold: weights are frozen, rows are long or layers have a state.
    """
    path = run / "metrics.jsonl"
    steps = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.is_file() else []
    steps = [step for step in steps if step["step"] > WARM_UP_STEPS]
    names = sorted({name for step in steps for name in step if name.startswith("perf/") or name == GAP})
    figures = {name: statistics.median(s[name] for s in steps if name in s) for name in names}
    peak = peak_flops(card())
    if "perf/backward_s" in figures and peak and parameters:
        tokens = figures["perf/tokens_per_s"] * figures["perf/step_s"]
        figures["mfu"] = tokens / figures["perf/backward_s"] * 6 * parameters / peak
    return figures


@cache
def card() -> str:
    """Return the name that the vendor's tool gives the first device; empty without that tool."""
    if not shutil.which("nvidia-smi"):
        return ""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    return done.stdout.partition("\n")[0].strip()


def peak_flops(name: str) -> float | None:
    """Return the dense bfloat16 FLOP/s of a card, None for one that is not in the table."""
    return next((peak for part, peak in PEAKS.items() if all(word in name for word in part.split())), None)


def profile_figures(run: Path, step: int, output: str) -> Figures:
    """Return the device time of a traced step by kernel (without a device: torch's operations), longest first."""
    trace = run / "profile" / f"step-{step}.json"
    if not trace.is_file():
        return {}
    events = [one for one in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"] if one.get("ph") == "X"]
    of_device = [one for one in events if one.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    total, calls = Counter[str](), Counter[str]()
    for event in of_device or [one for one in events if one.get("cat") == "cpu_op"]:
        total[event["name"]] += event["dur"]
        calls[event["name"]] += 1
    every = sum(total.values()) or 1
    lines = [
        f"{spent / 1e3:9.2f} ms {spent / every:6.1%} {calls[name]:7} x {name[:100]}"
        for name, spent in total.most_common(TOP_KERNELS)
    ]
    return {"device_ms": sum(one["dur"] for one in of_device) / 1e3, "kernels": lines}


def json_lines(output: str) -> Figures:
    """The lines of a benchmark that are JSON."""
    return {"rows": [json.loads(line) for line in output.splitlines() if line.startswith("{")]}


def printed_numbers(output: str) -> Figures:
    """The table of a benchmark as it was printed."""
    return {"table": [line for line in output.splitlines() if re.search(r"\d", line)][-30:]}


# -------------------------------------------------------------------------------------------------------- stages


def make_material(shape: str, folder: Path) -> int:
    """The model and data of one shape; returns the number of its parameters."""
    command = [PYTHON, str(HERE / "material.py"), shape, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT)
    found = re.search(r"([\d,]+) parameters", done.stdout)
    if done.returncode or found is None:
        raise RuntimeError(f"no model of shape {shape}: {done.stderr[-500:]}")
    return int(found[1].replace(",", ""))


@dataclass(frozen=True)
class Kit:
    """Locations and sizes of the models, data and runs."""

    work: Path  # models, data and runs
    shapes: Sequence[str]
    rehearse: bool = False
    parameters: dict[str, int] = field(default_factory=dict)  # of the shapes whose model is there

    def stages(self) -> dict[str, Callable[[], Stage]]:
        """Name -> what makes the stage, in the order in which they run."""
        sync = [PYTHON, str(ROOT / "benchmarks/weight_sync.py"), "--transports", "ipc", "--rounds", "5"]
        # Large enough that bytes take the time, and not what each bucket costs besides.
        large = [*("--device", "cuda", "--gb", "8"), *("--bucket-mib", "1024", "--layouts", "few large")]
        head = [PYTHON, str(ROOT / "benchmarks/head.py")]
        stages = [
            Stage("doctor", hone("doctor", "--full", "--json"), 60),
            Stage("conformance", hone("doctor", "--conformance", "--json"), 240, count_checks),
            *(self._tests(path, limit_s) for path, limit_s in TESTS.items() if path != TRITON or not self.rehearse),
            Stage("weight-sync", [*sync, *self._small("weight-sync", *large)], 90, printed_numbers),
            Stage("head", [*head, *self._small("head")], 60, printed_numbers),
        ]
        makers: dict[str, Callable[[], Stage]] = {stage.name: partial(_same, stage) for stage in stages}
        kinds = ("sft", "grpo", "decode", "profile", "trl", "sleep", "offload", "qlora", "long")
        for kind in kinds if self.rehearse else (*kinds, "ungraphed"):  # no CPU records graphs
            makers |= {f"{kind}-{shape}": partial(self._of_shape, kind, shape) for shape in self.shapes_of(kind)}
        makers["hybrid"] = partial(self._training, "hybrid", "hybrid-tiny" if self.rehearse else "hybrid", "hybrid")
        recipes = self._recipe("quickstart", 150), self._recipe("reverse", 120)
        return makers | {one.name: partial(_same, one) for one in recipes}

    def shapes_of(self, kind: str) -> Sequence[str]:
        """The largest trains by SFT only; what is tried once, with the first or the second."""
        if kind in ("decode", "ungraphed", "grpo", "trl"):
            return [shape for shape in self.shapes if shape != "4b"]
        if kind in ("offload", "qlora"):
            return self.shapes[1:2] or self.shapes[:1]
        return self.shapes[:1] if kind in ("profile", "sleep", "long") else self.shapes

    def _small(self, kind: str, *otherwise: str) -> tuple[str, ...]:
        return SMALL.get(kind, ()) if self.rehearse else otherwise

    def _tests(self, path: str, limit_s: float) -> Stage:
        """One file of tests; a rehearsal runs on the CPU what is for each device."""
        chosen = ["-k", "cpu"] if self.rehearse else ["-m", "gpu and not vllm and not sglang"]
        command = [PYTHON, "-m", "pytest", "-v", "--tb=short", "-W", "default", "-p", "no:cacheprovider", *chosen]
        name = "tests-" + re.sub(r"tests/|test_|\.py", "", path).replace("/", "-")
        return Stage(name, [*command, str(ROOT / path)], limit_s, count_tests)

    def _recipe(self, name: str, limit_s: float) -> Stage:
        command = hone("train", str(ROOT / f"recipes/{name}/grpo.yaml"), f"run.dir={self.work / name}")
        return Stage(name, [*command, *self._small(name)], limit_s, exact_match)

    def _of_shape(self, kind: str, shape: str) -> Stage:
        """A stage with a model of this shape, which is made when the first of them begins."""
        name = f"{kind}-{shape}"
        if kind not in ("decode", "ungraphed", "trl"):
            return self._training(kind, shape, name)
        folder = self._material(shape)
        if kind in ("decode", "ungraphed"):
            how = ["--execution", "fused"] if kind == "ungraphed" else []
            command = [PYTHON, str(ROOT / "benchmarks/decode.py"), str(folder / "model"), *how, *self._small(kind)]
            return Stage(name, command, 150, json_lines)
        batch = "16" if shape == "0.6b" else "8"
        fits = ("--batch", batch, "--rounds", "1", "actor.max_tokens_per_microbatch=16384")
        peer = ["--peer-python", str(PEER)] if self.rehearse and PEER.exists() else []
        command = [PYTHON, str(HERE / "beside_trl.py"), str(folder), *peer, *self._small(kind, *fits)]
        return Stage(name, command, 300, json_lines)

    def _material(self, shape: str) -> Path:
        """The folder of a model and its data, made once."""
        folder = self.work / "models" / shape
        if shape not in self.parameters:
            self.parameters[shape] = make_material(shape, folder)
        return folder

    def _training(self, kind: str, shape: str, name: str) -> Stage:
        """A run of one of `VARIANTS`."""
        folder, run = self._material(shape), self.work / name
        algorithm, data, keys = VARIANTS[kind]
        given = [f"run.dir={run}", f"model.path={folder / 'model'}", f"data.train.path={folder / data}.jsonl", *keys]
        if shape == "4b":
            given.append("actor.activation_checkpointing=true")
        training = [PYTHON, str(ROOT / "benchmarks/unsaved.py"), "sft" if algorithm == "sft" else "train"]
        command = [*training, str(HERE / f"{algorithm}.yaml"), *given, *self._small(algorithm)]
        whole = self.parameters[shape] if kind in ("sft", "grpo") else 0
        figures = partial(profile_figures, run, 3) if kind == "profile" else partial(step_figures, run, whole)
        return Stage(name, command, 150, figures)


def _same(stage: Stage) -> Stage:
    return stage


def run_stage(name: str, make: Callable[[], Stage], out: Path) -> dict[str, Any]:
    """Run one stage to its end or its limit; what its line says."""
    started = time.monotonic()
    try:
        stage = make()
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        return {"stage": name, "ok": False, "seconds": time.monotonic() - started, "error": str(error)}
    with tempfile.TemporaryFile() as file:
        process = subprocess.Popen(stage.command, stdout=file, stderr=file, cwd=ROOT, start_new_session=True)
        try:
            code: int | None = process.wait(timeout=stage.limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _kill_session(process)
        file.seek(0)
        output = file.read().decode(errors="replace")
    with (out / "output.log").open("a", encoding="utf-8") as log:
        log.write(f"\n===== {name}: {shlex.join(stage.command)}\n{output[-OUTPUT_BYTES:]}")
    line: dict[str, Any] = {"stage": name, "ok": code == 0, "seconds": round(time.monotonic() - started, 1)}
    if code is None:
        line["error"] = f"stopped after {stage.limit_s:g} s"
    line["figures"] = dict(stage.figures(output))
    line["tail"] = output.splitlines()[-TAIL_LINES:]
    return line


def run_in_turn(names: Sequence[str], makers: Mapping[str, Callable[[], Stage]], out: Path) -> Iterator[dict[str, Any]]:
    """Run the stages in this order and yield the line of each as it ends; tests that follow each other run together."""
    at_once = max(1, len(os.sched_getaffinity(0)) // TEST_CORES)
    for tests, few in groupby(names, key=lambda name: name.startswith("tests-")):
        if not tests:
            yield from (run_stage(name, makers[name], out) for name in few)
            continue
        with ThreadPoolExecutor(at_once) as pool:
            running = [pool.submit(run_stage, name, makers[name], out) for name in few]
            yield from (one.result() for one in running)


def _kill_session(process: subprocess.Popen[bytes]) -> None:
    """End the stage and whatever it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=30)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "stages", nargs="*", help="names of stages, what they begin with, or a plan (first, second); all"
    )
    parser.add_argument("--out", type=Path, default=ROOT / ".gpu-kit" / "out")
    parser.add_argument("--shapes", default="0.6b,1.7b,4b", help="model shapes of the runs that are measured")
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, each stage as small as possible")
    args = parser.parse_args()
    if args.rehearse:
        os.environ |= {"HONE_PLATFORM": "cpu", "OMP_NUM_THREADS": "1"}
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="gpu-kit-"))
    failed = 0
    try:
        makers = Kit(work, ["tiny"] if args.rehearse else args.shapes.split(","), args.rehearse).stages()
        wanted = [name for given in args.stages for name in PLANS.get(given, (given,))]
        chosen = {given: [n for n in makers if n == given or n.startswith(f"{given}-")] for given in wanted}
        if unknown := [given for given, names in chosen.items() if not names]:
            parser.error(f"no stage {', '.join(unknown)}; there are {', '.join(makers)}")
        names = [name for names in chosen.values() for name in names] or list(makers)
        with (out / "results.jsonl").open("a", encoding="utf-8") as results:
            for line in run_in_turn(names, makers, out):
                failed += not line["ok"]
                print(json.dumps({**line, "card": card()}), file=results, flush=True)
                outcome = "ok" if line["ok"] else "FAILED"
                print(f"{line['stage']}: {outcome} in {line['seconds']:.1f} s {line.get('figures', '')}", flush=True)
    finally:
        shutil.rmtree(work)
    return failed


if __name__ == "__main__":
    sys.exit(main())
