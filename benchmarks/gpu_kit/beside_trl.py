"""A GRPO step of hone beside one of TRL on the same device, in turns: `python beside_trl.py FOLDER`.

`FOLDER` is of material.py. hone trains float32 weights that it computes with in bfloat16; TRL trains bfloat16 weights,
which is its fastest way, and generates by transformers' `generate`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))  # the comparison's files import each other by name

import compare  # noqa: E402

ROUNDS = 3


def sides(folder: Path, tokens: int, batch: int, overrides: list[str]) -> compare.Case:
    """Both sides, with the same model, prompts and token counts."""
    case = "grpo_step"
    shared = (str(folder), "--max-tokens", str(tokens))
    return compare.Case(
        case,
        (
            compare.SidePlan("hone", "side_hone.py", (case, "bf16", *shared, *overrides)),
            compare.SidePlan("TRL bf16 weights", "side_trl.py", (case, "bf16_weights", *shared, "--batch", str(batch))),
        ),
        {},
    )


def arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--max-tokens", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16, help="sequences in one forward of TRL's training")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--peer-python", default=sys.executable, help="Python of the environment that has TRL")
    parser.add_argument("overrides", nargs="*", help="key=value for hone's run")
    return parser.parse_intermixed_args(given)  # before Python 3.12.7, overrides after an option are refused otherwise


def main() -> None:
    args = arguments()
    os.environ.setdefault("OMP_NUM_THREADS", str(len(os.sched_getaffinity(0))))
    model = args.folder / "model-uniform"  # the name that the sides look for
    if not model.exists():
        model.symlink_to("model", target_is_directory=True)
    pythons = {"side_hone.py": sys.executable, "side_trl.py": args.peer_python}
    with tempfile.TemporaryDirectory() as logs:
        case = sides(args.folder, args.max_tokens, args.batch, args.overrides)
        try:
            results = compare.measure(case, pythons, args.rounds, Path(logs))
        except RuntimeError as error:
            tails = [log.read_text(encoding="utf-8", errors="replace")[-1500:] for log in Path(logs).iterdir()]
            raise SystemExit("\n".join([*tails, str(error)])) from error
    print(compare.HEAD)
    for row in compare.summary(case, "bf16", results):
        print(compare.line(row))
        print(json.dumps({"side": row["side"], "wall_s": row["wall_s"], "tokens_per_s": row["tokens_per_s"]}))


if __name__ == "__main__":
    main()
