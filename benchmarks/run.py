"""Measures hone against TRL and against transformers' `generate`, on this machine, and prints ratios.

    python benchmarks/run.py                                             everything: about half an hour on two cores
    python benchmarks/run.py --rounds 2 --cases sft --precisions bf16    other arguments are those of compare.py

The first call makes TRL's environment, `.venv-bench`, from requirements/bench.lock. `THREADS` (default 2) is how many
threads whichever side is working may use. Results go to benchmarks/results/. Nothing else should run meanwhile.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
LOCK = ROOT / "requirements" / "bench.lock"
PEER = ROOT / ".venv-bench"
RESULTS = HERE / "results"


def peer_python() -> str:
    """The Python of TRL's environment, which is made anew if its lock file has changed."""
    python, made_from = PEER / "bin" / "python", PEER / LOCK.name
    if not made_from.is_file() or made_from.read_bytes() != LOCK.read_bytes():
        print(f"making {PEER.name} from requirements/{LOCK.name} (a minute or two, once)", flush=True)
        run([sys.executable, "-m", "venv", "--clear", str(PEER)])
        install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run([*install, "--constraint", str(LOCK), "torch"])  # with what its build for this machine needs
        run([*install, "--no-deps", "--requirement", str(LOCK)])
        shutil.copy(LOCK, made_from)  # written last: a half-made environment is made again
    return str(python)


def environment() -> dict[str, str]:
    """For every process: the threads of this measurement, and nothing from the network."""
    threads = os.environ.get("THREADS", "2")
    return {
        **os.environ,
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }


def run(command: list[str], log: Path | None = None) -> None:
    """Run to the end; output to the terminal, and to `log` if given. Ends this program if the command fails."""
    with subprocess.Popen(command, env=environment(), cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    if log is not None:
        log.write_text("".join(lines), encoding="utf-8")
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed with exit code {process.returncode}")


def main() -> None:
    if {"-h", "--help"} & set(sys.argv[1:]):
        print(__doc__)
        return
    peer = peer_python()
    RESULTS.mkdir(exist_ok=True)
    run([sys.executable, str(HERE / "material.py"), str(RESULTS / "material"), "--pretrained"])
    compare = [sys.executable, str(HERE / "compare.py"), "--peer-python", peer, "--results", str(RESULTS)]
    run([*compare, *sys.argv[1:]], RESULTS / "compare.txt")
    threads = environment()["OMP_NUM_THREADS"]
    if len(sys.argv) == 1:
        run([sys.executable, str(HERE / "rollout.py"), "--threads", threads], RESULTS / "rollout.txt")


if __name__ == "__main__":
    main()
