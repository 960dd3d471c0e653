"""Compiles the kernels of `triton_scores` for GPUs that are not here; prints a line of JSON for each.

python -m tests.engines.compile_triton_scores
"""

import json

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from hone.engines.kernels import triton_scores

TARGETS = GPUTarget("cuda", 80, 32), GPUTarget("cuda", 90, 32), GPUTarget("hip", "gfx942", 64)
ALIGNED = {(position,): [["tt.divisibility", 16]] for position in range(4)}  # tensors of torch, and a usual vocabulary

if __name__ == "__main__":
    for target in TARGETS:
        for kernel in (triton_scores._score, triton_scores._differentiate):
            for dtype in ("bf16", "fp16", "fp32"):
                for outer in (0.0, 30.0):
                    kinds = [f"*{dtype}", "*i64", "*fp32", "i32", *["constexpr"] * 3]
                    constants = {(4,): 0.5, (5,): outer, (6,): triton_scores._BLOCK}
                    signature = dict(zip(kernel.arg_names, kinds, strict=True))
                    source = ASTSource(kernel, signature, constants, ALIGNED)
                    compiled = triton.compile(source, target=target, options=triton_scores._OPTIONS)
                    binary = "hsaco" if target.backend == "hip" else "cubin"
                    line = {"target": f"{target.backend} {target.arch}", "kernel": kernel.__name__, "dtype": dtype}
                    print(json.dumps(line | {"bytes": len(compiled.asm[binary])}))
