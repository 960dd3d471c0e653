"""Random faults against a training run with two servers: `python -m tests.faults.soak --minutes 30 --seed 0`.

Each fault is followed by an event, never by a time: the run has to finish two more steps before the next one. At the
end Ctrl-C stops the run, and its ledger, its processes and its folders are counted.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.trainers.tiny import BASE, recipe

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("poisoned_server.py")
PATIENCE_S = 240.0  # for one event, on a busy machine
GARBAGE = (b"\x00\x00\x00\x02{}", b"[" * 65536, b"POST /generate HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n{")


class Soak:
    """One run under fire."""

    def __init__(self, folder, seed):
        self.random = random.Random(seed)
        self.run, self.log = folder / "run", folder / "log.txt"
        self.poison, self.temporary = folder / "poison", folder / "t"
        self.temporary.mkdir()
        self.sockets, self.done = [], []
        rollout = {
            "backend": "poisoned",
            "replicas": 2,
            "max_restarts": 10_000,
            "request_timeout_s": 20,  # a server counts as hung after 5 s
            "start_timeout_s": PATIENCE_S / 2,  # also a server that is stopped while it starts is ended in time
            "sampling": {"max_response_tokens": 3},
        }
        changes = {"rollout": rollout, "weights": {"timeout_s": 60}, "run": {**BASE["run"], "steps": 1_000_000}}
        path = recipe(folder, changes)
        environment = {
            **os.environ,
            "HONE_USE_EXTERNAL_MODULES": "tests.faults.poisoned_server",
            "HONE_TEST_POISON": str(self.poison),
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(self.temporary),
        }
        with self.log.open("wb") as out:
            command = [sys.executable, "-m", "hone", "train", str(path)]
            self.process = subprocess.Popen(command, stdout=out, stderr=out, cwd=ROOT, env=environment)

    # ------------------------------------------------------------------------------------------------- what is seen

    def processes(self):
        """(process id, arguments) of every process of the run but the first."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                arguments = (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue
            if state not in "ZX" and str(self.run) in " ".join(arguments) and int(entry.name) != os.getpid():
                found.append((int(entry.name), arguments))
        return found

    def servers(self):
        """Those that listen: one that is starting has no socket yet."""
        found = [one for one in self.processes() if len(one[1]) > 2 and one[1][1] == str(PROGRAM)]
        return [one for one in found if os.path.exists(json.loads(one[1][2])["socket"])]

    def steps(self):
        path = self.run / "metrics.jsonl"
        return len(path.read_text().splitlines()) if path.is_file() else 0

    def until(self, happened, what):
        deadline = time.monotonic() + PATIENCE_S
        while not happened():
            assert self.process.poll() is None, f"the run ended: {what}\n{self.log.read_text()[-4000:]}"
            assert time.monotonic() < deadline, f"this did not happen: {what}\n{self.log.read_text()[-4000:]}"
            time.sleep(0.05)

    def goes_on(self, what):
        begun = self.steps()
        self.until(lambda: self.steps() >= begun + 2, f"two steps after {what}")

    # ------------------------------------------------------------------------------------------------------- faults

    def kill(self):
        os.kill(self.victim()[0], signal.SIGKILL)

    def stop(self):
        victim = self.victim()[0]
        os.kill(victim, signal.SIGSTOP)
        self.until(lambda: not Path(f"/proc/{victim}").exists(), "the stopped server was ended")

    def starve(self):
        """A server that can open no further descriptor."""
        resource.prlimit(self.victim()[0], resource.RLIMIT_NOFILE, (3, 3))

    def talk_nonsense(self):
        for garbage in GARBAGE:
            with socket.socket(socket.AF_UNIX) as peer:
                peer.connect(json.loads(self.victim()[1][2])["socket"])
                peer.sendall(garbage)

    def dawdle(self):
        """Peers that never finish what they begin, and stay."""
        path = json.loads(self.victim()[1][2])["socket"]
        for _ in range(20):
            peer = socket.socket(socket.AF_UNIX)
            self.sockets.append(peer)
            peer.connect(path)
            peer.sendall(b"POST /generate HTTP/1.1\r\nHost: a")

    def plant_poison(self):
        """One request that every server dies of; it fails alone."""
        self.poison.write_text("")
        self.goes_on("a poison request")
        assert self.poison.read_text(), "no request took it"
        self.poison.unlink()

    def victim(self):
        self.until(self.servers, "a server runs")
        return self.random.choice(self.servers())

    # -------------------------------------------------------------------------------------------------- whole story

    def go(self, seconds):
        """Every kind of fault once in random order, then again until the time is over."""
        kinds = [self.kill, self.stop, self.starve, self.talk_nonsense, self.dawdle, self.plant_poison]
        self.until(lambda: self.steps() >= 2, "two steps")
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            for fault in self.random.sample(kinds, len(kinds)):
                if time.monotonic() >= ends and len(self.done) >= len(kinds):
                    break
                self.meet(fault)
                self.goes_on(fault.__name__)
                self.done.append(fault.__name__)

    def meet(self, fault):
        """The fault, with another victim where the one before it had just ended the first."""
        while True:
            try:
                return fault()
            except (ConnectionError, FileNotFoundError, ProcessLookupError):
                self.goes_on(f"{fault.__name__} found its server gone")

    def end(self):
        """Stop the run; returns its exit status, the processes that are left of it, and the private folders."""
        self.process.send_signal(signal.SIGINT)
        status = self.process.wait(PATIENCE_S)
        for peer in self.sockets:
            peer.close()
        deadline = time.monotonic() + 30
        while self.processes() and time.monotonic() < deadline:
            time.sleep(0.05)
        left = [" ".join(arguments)[:200] for _, arguments in self.processes()]
        return status, left, sorted(one.name for one in self.temporary.iterdir() if one.name.startswith("hone-"))

    def close(self):
        self.process.kill()
        self.process.wait(PATIENCE_S)
        for peer in self.sockets:
            peer.close()


def check(soak, status, left, folders):
    """Count what became of every prompt, process and folder; returns the ledger as text."""
    assert status == 130, soak.log.read_text()[-4000:]
    newest = max((soak.run / "checkpoints").glob("step_*/state.json"))
    ledger = json.loads(newest.read_text())["state"]["ledger"]
    dropped = sum(ledger["dropped"].values())
    assert ledger["open"] == {}, "a prompt is lost"
    assert ledger["next"] == ledger["trained"] + dropped, "a prompt is lost, or was counted twice"
    assert left == [], "a process outlived the run"
    assert folders == [], "a server's folder is left"
    return f"{ledger['next']} prompts drawn, {ledger['trained']} trained, {dropped} dropped: {ledger['dropped']}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="soak-"))
    soak = Soak(folder, given.seed)
    try:
        soak.go(given.minutes * 60)
        ended = soak.end()
    finally:
        soak.close()
    sys.stdout.write(f"{len(soak.done)} faults, {soak.steps()} steps; {check(soak, *ended)}\n")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
