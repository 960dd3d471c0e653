"""Kinds of devices are named in `hone/platforms` only. Everything else asks the platform, or torch in general."""

import ast
import re
from collections.abc import Iterator

NAMES_OF_ONE_DEVICE = re.compile(r"cuda|nccl", re.I)


EXCEPTIONS = {  # file -> (what it may say, why)
    **{
        f"hone/migration/{name}.py": (None, "names of options and values of another framework")
        for name in ("verl/dropped", "verl/engine", "verl/rollout")
    },
    "plugins/megatron/hone_megatron/cpu_patches.py": (
        None,
        "patches of a library that takes every device for this one",
    ),
    "plugins/megatron/hone_megatron/engine.py": (
        {"model_parallel_cuda_manual_seed"},
        "Megatron's name of the function that seeds every rank, on any device",
    ),
    "plugins/sglang/hone_sglang/server.py": (
        {"disable_prefill_cuda_graph", "disable_decode_cuda_graph", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH"},
        "SGLang's names of its own options",
    ),
}


def _said(tree: ast.Module) -> Iterator[str]:
    """Names, attributes, imported names and texts of a module, without docstrings and comments."""
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.alias):
            yield node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            yield node.value


def test_no_kind_of_device_is_named_outside_of_the_platforms(products):
    wrong = []
    for module in products:
        allowed, _ = EXCEPTIONS.get(str(module.path), (set(), ""))
        if module.part != "platforms" and allowed is not None:
            said = {text for text in _said(module.tree) if NAMES_OF_ONE_DEVICE.search(text)}
            wrong += [f"{module.path}: {text[:80]}" for text in sorted(said - allowed)]
    assert wrong == []


def test_the_exceptions_are_still_needed(products):
    modules = {str(module.path): module for module in products}
    for path, (allowed, _) in EXCEPTIONS.items():
        said = {text for text in _said(modules[path].tree) if NAMES_OF_ONE_DEVICE.search(text)}
        assert said
        assert allowed is None or allowed <= said
