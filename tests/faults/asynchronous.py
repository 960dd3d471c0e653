"""Faults against an asynchronous run: `python -m tests.faults.asynchronous --steps 200 --kills 20`.

First a run without faults, then the same run with two servers: one is killed every 15 s, one stopped in between
(SIGSTOP), one joins and one leaves every 20 steps. Then the trainer itself is killed at random moments, and started
again. The journal counts what became of every prompt; with `finish`, metrics and weights have to be equal each time.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from hone.cli.recipe import load_recipe
from hone.processes.supervisor import descendants
from hone.schedule.journal import JOURNAL, read_journal
from hone.trainers.run.context import RunControl
from hone.trainers.run.launch import run_policy
from hone.workers.control import CONTROL, request
from tests.trainers.test_asynchronous import AHEAD, assert_same
from tests.trainers.tiny import recipe

ROOT = Path(__file__).parents[2]
PATIENCE_S = 240.0  # for one event, on a busy machine
KILL_S, MEMBERS_STEPS = 15.0, 20


def settings(steps, replicas, new_weights="finish"):
    return {
        **AHEAD,
        "run": {**AHEAD["run"], "steps": steps},
        "rollout": {
            **AHEAD["rollout"],
            "replicas": replicas,
            "max_restarts": 10_000,
            "request_timeout_s": 40,  # a server counts as hung after 10 s
            "start_timeout_s": PATIENCE_S / 2,  # also a server that is stopped while it starts is ended in time
        },
        "evaluation": {},
        "checkpoint": {"every_steps": 5},
        "asynchrony": {"staleness": 1, "new_weights": new_weights},
    }


def servers():
    """The processes of this process's rollout servers that listen: one that is starting has no socket yet."""
    return [one for one in descendants(os.getpid()) if _listens(arguments_of(one))]


def _listens(arguments):
    """A supervisor has the arguments of its server after its own."""
    return arguments[3:4] == ["hone.workers.inside.builtin"] and Path(json.loads(arguments[4])["socket"]).exists()


def arguments_of(process):
    try:
        return Path(f"/proc/{process}/cmdline").read_text(errors="replace").split("\0")
    except OSError:  # it has ended
        return []


class Faults:
    """What happens to the servers of the run in `folder`; called between two of its steps."""

    def __init__(self, folder):
        self.folder = folder
        self.names = ["builtin-0", "builtin-1"]
        self.done = Counter()
        self.stopped = 0  # a process
        self._random = random.Random(0)

    def kill(self):
        self._signal(signal.SIGKILL)

    def stop(self):
        self.stopped = self._signal(signal.SIGSTOP)

    def notice(self):
        """Wait for the end of the process that was stopped: the run has to find that it hangs, and kill it."""
        if self.stopped:
            self._until(lambda: not arguments_of(self.stopped), "the server that hangs is killed")
            self.done["noticed"] += 1

    def join(self):
        self.names.append(self._ask("join").split()[0])
        self.done["join"] += 1

    def leave(self):
        self._ask("leave", self.names.pop(0))
        self.done["leave"] += 1

    def _signal(self, number):
        chosen = self._random.choice(self._until(servers, "a server runs"))
        try:
            os.kill(chosen, number)
        except ProcessLookupError:  # the fault before had just ended it
            return 0
        self.done[signal.Signals(number).name] += 1
        return chosen

    def _ask(self, verb, name=""):
        def asked():
            try:
                return request(self.folder / CONTROL, verb, name, PATIENCE_S)
            except ValueError as error:
                if "last replica that runs" not in str(error):  # the other one is being started
                    raise
                return ""

        return self._until(asked, f"{verb} {name}")

    @staticmethod
    def _until(happened, what):
        deadline = time.monotonic() + PATIENCE_S
        while not (found := happened()):
            assert time.monotonic() < deadline, f"this did not happen: {what}"
            time.sleep(0.05)
        return found


def count(run):
    """How many prompts were admitted and never taken, and taken twice; those of a finished run."""
    records = list(read_journal(run / JOURNAL))
    admitted = Counter(number for record in records for number in record["admitted"])
    taken = Counter(number for record in records for number in record["taken"])
    lost = admitted.keys() - taken.keys()
    doubled = [number for number, times in taken.items() if times > 1 or admitted[number] != 1]
    return len(admitted), len(lost), len(doubled)


def disturbed(folder, steps, on_step):
    """Train with `on_step(faults, step)` after each step; returns the faults and the run folder."""
    path = recipe(folder, settings(steps, replicas=2))
    faults = Faults(folder / "run")
    run = run_policy(load_recipe(path), RunControl(on_step=lambda step, figures: on_step(faults, step)))
    return faults, run


def undisturbed(folder, steps):
    return run_policy(load_recipe(recipe(folder, settings(steps, replicas=1))))


class ByTheClock:
    """A kill every 15 s, a stop in between; one joins and one leaves every 20 steps."""

    def __init__(self):
        self._began, self._turn = time.monotonic(), 1

    def __call__(self, faults, step):
        if time.monotonic() > self._began + self._turn * KILL_S / 2:
            (faults.stop if self._turn % 2 else faults.kill)()
            self._turn += 1
        if step and step % MEMBERS_STEPS == 0:
            faults.join()
            faults.leave()


def killed(folder, steps, kills, seed=0, new_weights="finish"):
    """Kill the trainer so many times at random moments, and let the last launch end; returns the run folder.

    A launch is killed a random time after it has written a random number of new records.
    """
    chance, path, run = random.Random(seed), recipe(folder, settings(steps, 1, new_weights)), folder / "run"
    for number in range(kills + 1):
        log = folder / f"launch-{number}.txt"
        with log.open("wb") as out:
            command = [sys.executable, "-m", "hone", "train", str(path)]
            process = subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT)
        try:
            if number == kills:
                assert process.wait(PATIENCE_S) == 0, log.read_text()
                break
            _wait_for_records(process, run, chance.randint(0, 2), log)
            time.sleep(chance.uniform(0.0, 0.4))
        finally:
            process.kill()
            process.wait(PATIENCE_S)
    return run


def _wait_for_records(process, run, more, log):
    """Wait until this launch has appended so many records, which may replace records of the launch before."""
    path, deadline = run / JOURNAL, time.monotonic() + PATIENCE_S
    before, seen = path.stat().st_mtime_ns if path.exists() else 0, 0
    while seen < more and process.poll() is None:
        assert time.monotonic() < deadline, log.read_text()
        now = path.stat().st_mtime_ns if path.exists() else 0
        seen += now != before
        before = now
        time.sleep(0.002)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--kills", type=int, default=20)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="asynchronous-"))
    whole = undisturbed(folder / "whole", given.steps)
    faults, run = disturbed(folder / "disturbed", given.steps, ByTheClock())
    admitted, lost, doubled = count(run)
    sys.stdout.write(f"{given.steps} steps, {admitted} prompts, {lost} lost, {doubled} doubled; {dict(faults.done)}\n")
    assert_same(whole, run)
    if given.kills:
        assert_same(whole, killed(folder / "killed", given.steps, given.kills))
        sys.stdout.write(f"the trainer was killed {given.kills} times\n")
    sys.stdout.write("metrics, rollouts, journal and weights are equal\n")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
