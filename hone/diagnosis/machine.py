"""Rules about the machine: memory, speed, servers, disk, and how the run ended."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import accumulate
from statistics import median, mode

from hone.diagnosis.evidence import Evidence, Finding
from hone.diagnosis.trends import RECENT, Curve
from hone.tracking.base import FAILURE_FILE
from hone.tracking.report.prediction import resident
from hone.tracking.report.rundata import HELD, IN_PHASE, cause_of

MEMORY_WORDS = ("out of memory", "outofmemory", "memoryerror", "cannot allocate memory", "defaultcpuallocator")
PHASES = ("generate", "reward", "forward", "backward", "weight_sync", "trainer_wait")
FULL_DISK = 0.03
SHOWN_PARTS = 5
SLOW_REPLICA = 0.5
"""Share of the speed of the others."""
WAITS, IDLE = 0.5, 0.4
"""Shares of the time: a trainer that waits for more has a slow partner, a server that works for less idles."""
SLOW_RANK = 0.7
"""Speed of a rank, as a share of the other ranks' median, below which it is slow: all ranks wait for it."""
TRAINED = {"train": "trained model", "process_reward": "process reward model"}


def is_of_memory(text: str) -> bool:
    """Return whether a traceback says that memory was short."""
    return any(words in text.lower() for words in MEMORY_WORDS)


def out_of_memory(run: Evidence) -> Iterator[Finding]:
    """The run ended because memory was short."""
    if not is_of_memory(run.failure):
        return
    phases = [line.removeprefix(IN_PHASE) for line in run.failure.splitlines() if line.startswith(IN_PHASE)]
    where = f" in {phases[0]}" if phases else ""  # the innermost
    tokens = run.setting("actor.max_tokens_per_microbatch")
    fewer = "1024 (more, if a sequence is longer)" if tokens is None else tokens // 2
    tries = [f"actor.max_tokens_per_microbatch={fewer}"]
    if not run.setting("actor.activation_checkpointing", False):
        tries.append("actor.activation_checkpointing=true")
    if not run.setting("actor.backend.offload", False):
        tries.append("actor.backend.offload=true")
    if run.setting("rollout.backend") == "builtin":
        kept = run.setting("rollout.builtin.kv_cache_tokens", 262_144)
        tries.append(f"rollout.builtin.kv_cache_tokens={kept // 2}")
    else:
        tries.append("a lower rollout.engine.gpu_memory_utilization")
    yield Finding(
        "stops",
        f"out of memory{where}",
        "; ".join([cause_of(run.failure)[:200], *_resident(run, phases[0] if phases else "")]),
        "Weights, optimizer state, activations of one micro-batch and the KV cache share the memory; "
        "`hone plan` computes them, by phase.",
        tuple(tries),
    )


def _resident(run: Evidence, phase: str) -> Iterator[str]:
    """Name what the process held at the end, if the model was in it, and what the forecast counts in the phase."""
    held = [line for line in run.failure.splitlines() if line.startswith(HELD)]
    if held and run.setting("runtime.backend.name", "local") == "local":
        yield held[-1]
    parts = resident(run.folder, phase)
    if parts:
        named = [f"{what} {_gib(size)}" for what, size in parts[:SHOWN_PARTS]]
        total = _gib(sum(size for _, size in parts))
        yield f"resident then, as predicted at launch: {', '.join(named)} ({total} in all)"


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 / 10 else f"{size / 2**20:.1f} MiB"


def ended_in_an_error(run: Evidence) -> Iterator[Finding]:
    """The run failed for another reason than memory."""
    if run.failure and not is_of_memory(run.failure):
        path = run.folder / FAILURE_FILE
        tries = (
            f"read {path}" if path.is_file() else "read the traceback where the program that trained has printed it",
            "run the same command again: it continues from the last checkpoint",
        )
        yield Finding(
            "stops",
            "the run ended in an error",
            cause_of(run.failure)[:300],
            "The traceback names the part that failed.",
            tries,
        )


def was_killed(run: Evidence) -> Iterator[Finding]:
    """The process of the run is gone, and had no time to say why."""
    if run.vanished:
        tries = (
            "dmesg | grep -i 'killed process' (memory of the machine), and the limits of the job or container",
            "run the same command again: it continues from the last checkpoint",
        )
        seen = f"run.json has no end, the last step is {run.last_step}, and no process here writes the folder"
        meaning = (
            "SIGKILL, by the kernel for want of memory or by a scheduler; or the machine stopped, or it runs elsewhere."
        )
        yield Finding("stops", "the run was killed", seen, meaning, tries)


def throughput_fell(run: Evidence) -> Iterator[Finding]:
    """Tokens per second dropped and stayed down; the phase that grew is named."""
    speed = run.curve("perf/tokens_per_s")
    start = speed.shifted_below(0.6)
    if start is None:
        return
    before = median(point.value for point in speed if point.step < start) if speed[0].step < start else 0.0
    after = median(point.value for point in speed if point.step >= start)
    grown = []
    for phase in PHASES:
        curve = run.curve(f"perf/{phase}_s")
        old = [point.value for point in curve if point.step < start]
        new = [point.value for point in curve if point.step >= start]
        if old and new and median(new) > 1.3 * median(old):
            grown.append((median(new) - median(old), phase, median(old), median(new)))
    slow = max(grown, default=None)
    cause = f"; perf/{slow[1]}_s grew from {slow[2]:.3g} to {slow[3]:.3g} s" if slow else ""
    for slowest in (*replica_is_slow(run), *rank_is_slow(run)):
        cause += f"; {slowest.seen}"
    tries = {
        "generate": (
            "longer answers take longer: see rollout/response_length",
            "look for a slow replica in servers/*.log",
        ),
        "reward": ("see perf/reward_call_max_seconds; raise reward.workers",),
        "weight_sync": ("see weights/bytes and the network between trainer and servers",),
        "trainer_wait": ("more rollout servers, or a higher asynchrony.staleness",),
    }
    yield Finding(
        "hurts",
        "throughput fell",
        f"perf/tokens_per_s {before:,.0f} before step {start}, {after:,.0f} since{cause}",
        "One phase became slower: longer answers, a slow server or reward, or other work on the machine.",
        tries.get(slow[1] if slow else "", ("compare the phases in the report; look for other work on the machine",)),
        ("perf/tokens_per_s", *(f"perf/{phase}_s" for phase in PHASES)),
    )


def servers_restarted(run: Evidence) -> Iterator[Finding]:
    """Rollout servers died or stopped serving."""
    restarts = [point for point in run.curve("rollout/replica_restarts") if point.value > 0]
    serving = run.curve("rollout/replicas_serving")
    most = list(accumulate((point.value for point in serving), max))  # so far: replicas may join
    fewer = [(point, before) for point, before in zip(serving, most, strict=True) if point.value < before]
    if restarts:
        total, first = sum(point.value for point in restarts), restarts[0].step
        seen = f"{total:.0f} restarts, the first in step {first}"
    elif fewer:
        point, before = fewer[0]
        seen = f"{point.value:.0f} of {before:.0f} replicas served from step {point.step}"
    else:
        return
    tries = (
        "read the end of servers/<name>.log",
        "see `dmesg` for killed processes",
        "lower the engine's memory share",
    )
    meaning = "A server crashed, hung, or was killed for its memory. The run went on with the others."
    yield Finding("hurts", "a rollout server failed", seen, meaning, tries, ("rollout/replica_restarts",))


def replica_is_slow(run: Evidence) -> Iterator[Finding]:
    """One rollout replica generates far more slowly than the others."""
    speed, which = (run.curve(f"perf/slowest_replica{end}").last(RECENT) for end in ("_speed", ""))
    if which and len(speed) >= 3 and speed.level() < SLOW_REPLICA:
        number = mode(int(point.value) for point in which)
        tries = (
            f"read servers/*.log of replica {number}, and look at the load and clock of its device",
            "rollout.replicas on equal devices",
        )
        seen = f"replica {number} generates at {speed.level():.0%} of the speed of the others (last {len(speed)} steps)"
        meaning = "Every step waits for its answers: a shared, throttled or failing device, or a longer queue there."
        yield Finding("hurts", "a rollout replica is slow", seen, meaning, tries, ("perf/slowest_replica_speed",))


def rank_is_slow(run: Evidence) -> Iterator[Finding]:
    """One rank does its own work in training far more slowly than the others, which wait for it."""
    roles: dict[str, dict[str, Curve]] = {}
    for name in run.names("perf/"):
        if "/rank_speed/" in name and run.curve(name):
            roles.setdefault(name.split("/")[1], {})[name] = run.curve(name)
    for role, curves in roles.items():
        newest = max(curve[-1].step for curve in curves.values())
        found = []
        for name, curve in curves.items():
            start = curve.since([share < SLOW_RANK for _, share in curve.smooth()])
            slow = [share for step, share in curve if start is not None and step >= start]
            if len(slow) >= RECENT and curve[-1].step > newest - RECENT:  # the run may have fewer ranks than before
                found.append((median(slow), start, name))
        if not found:
            continue
        share, start, name = min(found)
        number = name.rpartition("/")[2]
        model = TRAINED.get(role, role)
        tries = (
            f"look at the clock, the temperature and other processes of the device and the cores of rank {number}",
            f"a trace of one step of it: profile.steps=STEP profile.ranks={number}",
        )
        seen = f"rank {number} of the {model} computes at {share:.0%} of the speed of the others since step {start}"
        meaning = "All ranks wait for it in every layer: a shared, throttled or failing device, or too few cores."
        yield Finding("hurts", "a rank is slow", seen, meaning, tries, (name,))


def trainer_waits(run: Evidence) -> Iterator[Finding]:
    """An asynchronous trainer spends most of its time waiting for answers."""
    waits, busy, share = run.curve("perf/trainer_wait_s"), run.curve("perf/rollout_utilisation"), _waiting(run)
    if share <= WAITS:
        return
    seen = f"the trainer waits {share:.0%} of a step for answers (perf/trainer_wait_s {waits.end():.3g} s)"
    metrics = ["perf/trainer_wait_s"]
    if busy.long and busy.end() < IDLE:
        seen += f"; a replica has a request {busy.end():.0%} of the time"
        meaning = "Neither side works: answers wait for their rewards or environments, or too few prompts are open."
        tries = ("raise reward.workers", "faster rewards or environments", "a higher asynchrony.staleness")
        metrics += ["perf/rollout_utilisation", "perf/reward_group_seconds"]
    else:
        meaning = "Generation is the bottleneck; the trainer's devices idle."
        tries = ("more replicas: rollout.replicas", "fewer devices for the trainer", "a higher asynchrony.staleness")
    yield Finding("hurts", "the trainer waits for answers", seen, meaning, tries, tuple(metrics))


def _waiting(run: Evidence) -> float:
    """Share of a step in which the trainer waits; 0 in short runs."""
    waits, steps = run.curve("perf/trainer_wait_s"), run.curve("perf/step_s")
    return waits.end() / steps.end() if waits.long and steps.long and steps.end() > 0 else 0.0


def servers_idle(run: Evidence) -> Iterator[Finding]:
    """Rollout servers have no request most of the time in an asynchronous run whose trainer works."""
    busy = run.curve("perf/rollout_utilisation")
    if run.setting("asynchrony.staleness", 0) and busy.long and busy.end() < IDLE and _waiting(run) <= WAITS:
        tries = ("fewer replicas", "a higher asynchrony.staleness", "more prompts per step")
        seen = f"a replica has a request {busy.end():.0%} of the time"
        meaning = "Training is the bottleneck, or too few prompts are open at a time."
        yield Finding("note", "rollout servers idle", seen, meaning, tries, ("perf/rollout_utilisation",))


def driver_is_slow(run: Evidence) -> Iterator[Finding]:
    """The part of a step that is neither generation nor training is large."""
    share, seconds = run.curve("perf/driver_fraction"), run.curve("perf/driver_s")
    if share.long and share.end() > 0.15 and seconds.long and seconds.end() > 0.2:
        tries = ("tracking.rollouts_per_step=0 shows whether writing rollouts costs it", "py-spy dump --pid PID")
        seen = f"perf/driver_fraction {share.end():.0%} of a step ({seconds.end():.3g} s)"
        meaning = "The driver packs, scores or writes for long; usually a slow reward in the driver, or a slow disk."
        yield Finding("note", "the driver takes a large share of a step", seen, meaning, tries, ("perf/driver_s",))


def disk_nearly_full(run: Evidence) -> Iterator[Finding]:
    """The disk of the run folder is almost full."""
    usage = shutil.disk_usage(run.folder)
    free = usage.free / usage.total
    if free < FULL_DISK:
        kept = run.setting("checkpoint.keep", 2)
        tries = (f"checkpoint.keep={max(1, kept - 1)}", "tracking.rollouts_per_step=0", "another disk for run.dir")
        seen = f"{usage.free / 2**30:.1f} GiB free, {free:.1%} of the disk of {run.folder}"
        yield Finding("hurts", "the disk is nearly full", seen, "A checkpoint that does not fit ends a run.", tries)


RULES = (
    out_of_memory,
    ended_in_an_error,
    was_killed,
    throughput_fell,
    servers_restarted,
    replica_is_slow,
    rank_is_slow,
    trainer_waits,
    servers_idle,
    driver_is_slow,
    disk_nearly_full,
)
