"""Log-probs and entropy of a head, forward and backward: hone's Triton kernels beside PyTorch's operations.

    python benchmarks/head.py                                   # Qwen3's head: 4,096 rows, 1,024 wide, 151,936 tokens
    python benchmarks/head.py --rows 64 --width 64 --tokens 4096

Both ways take turns; each figure is the median over the rounds. `logits GB/s` counts what the kernels have to move: a
forward reads the logits once, a backward reads and writes them, in the dtype of the head. It counts the same for both
ways, and the time of the matrix products is part of it.
"""

from __future__ import annotations

import argparse
import os
import time
from statistics import median

import torch

from hone.engines.logprobs import Head, score_tokens
from hone.platforms.base import TRITON_SWITCH, compute_dtype, current_platform, why_no_triton

NEEDS = frozenset({"entropy"})


def measure(ways: dict[str, str], args: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of each round, by way; the first round of each is a warm-up."""
    platform = current_platform()
    device, dtype = platform.torch_device(), getattr(torch, compute_dtype("auto", platform))
    hidden = torch.randn(args.rows, args.width, device=device, dtype=dtype).requires_grad_()
    weight = (torch.randn(args.tokens, args.width, device=device, dtype=dtype) / args.width**0.5).requires_grad_()
    targets = torch.randint(0, args.tokens, (args.rows,), device=device)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(1 + args.rounds):
        for way, switch in ways.items():
            os.environ[TRITON_SWITCH] = switch
            hidden.grad = weight.grad = None
            platform.synchronize()
            started = time.perf_counter()
            scores = score_tokens(hidden, targets, Head(weight), chunk_tokens=args.chunk, needs=NEEDS)
            (scores.logprobs.mean() + scores.entropy.mean()).backward()
            platform.synchronize()
            seconds[way].append(time.perf_counter() - started)
    return {way: rounds[1:] for way, rounds in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("rows", 4096), ("width", 1024), ("tokens", 151_936), ("chunk", 1024), ("rounds", 9)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    platform = current_platform()
    reason = why_no_triton(platform)
    ways = {"PyTorch": "0"} if reason else {"PyTorch": "0", "Triton": "1"}
    itemsize = getattr(torch, compute_dtype("auto", platform)).itemsize
    moved = 3 * args.rows * args.tokens * itemsize
    print(
        f"{platform.device_name()}: {args.rows} rows, {args.width} wide, {args.tokens} tokens, chunks of {args.chunk}"
    )
    if reason:
        print(f"no Triton kernels: {reason}")
    for way, rounds in measure(ways, args).items():
        print(f"{way}: {median(rounds) * 1e3:.2f} ms, logits {moved / median(rounds) / 1e9:.1f} GB/s")


if __name__ == "__main__":
    main()
