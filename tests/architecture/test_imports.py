"""Who may import whom: levels, cycles, lazy and third-party imports. The table is the architecture."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping

import pytest

LEVEL_0 = frozenset(
    {"composition", "config", "config_errors", "deadline", "explain", "full_disk", "machine", "other_frameworks"}
    | {"outage", "plugins", "registry", "spans", "types"}
)
WITH_TORCH = frozenset({"spans"})  # arithmetic; whoever imports it has tensors already
LEVEL_1 = frozenset({"algorithms", "data", "models", "platforms", "processes", "sandboxes", "schedule", "tracking"})
LEVEL_2 = frozenset({"engines", "rollout", "weights", "runtime", "envs", "rewards", "planner"})

NOT_THE_MATHEMATICS = LEVEL_0 | LEVEL_1 - {"algorithms"}  # a loss reaches an engine as a function, joined by a worker

MAY_IMPORT: Mapping[str, frozenset[str]] = {
    "types": frozenset(),
    "deadline": frozenset(),
    "full_disk": frozenset(),
    "machine": frozenset(),
    "outage": frozenset(),
    "plugins": frozenset(),
    "registry": frozenset({"plugins"}),
    "spans": frozenset(),
    "composition": frozenset(),
    "other_frameworks": frozenset(),
    "config_errors": frozenset({"composition"}),
    "config": frozenset({"composition", "config_errors", "other_frameworks", "registry"}),
    "explain": frozenset({"composition", "config", "registry"}),
    **dict.fromkeys(LEVEL_1, LEVEL_0),
    "migration": frozenset({"composition", "other_frameworks", "registry"}),
    "diagnosis": frozenset({"composition", "tracking"}),
    "sandboxes": LEVEL_0 | {"processes"},  # a sandbox is a child process with less rights
    **dict.fromkeys(LEVEL_2, NOT_THE_MATHEMATICS),
    "workers": LEVEL_0 | LEVEL_1 | {"engines", "rollout", "weights", "runtime"},
    "trainers": LEVEL_0 | LEVEL_1 | {"workers", "runtime", "envs", "rewards", "planner", "diagnosis"},
    "service": LEVEL_0 | LEVEL_1 | {"workers", "envs"},
    "testing": LEVEL_0 | LEVEL_1 | LEVEL_2 | {"workers", "trainers"},
    "cli": LEVEL_0 | LEVEL_1 | LEVEL_2 | {"workers", "trainers", "service", "testing", "migration", "diagnosis"},
    "objects": frozenset({"composition"}),
    "api": LEVEL_0 | LEVEL_1 | LEVEL_2 | {"workers", "trainers", "cli", "objects"},
    "__main__": frozenset({"cli"}),
    "": frozenset(),  # hone/__init__.py; it holds the version, which anybody may read
}
"""Part of `hone` -> parts that it may import. A run file holds everybody's settings, so `service`, `trainers` and
`workers` may import any `settings` module."""
SETTINGS_READERS = frozenset({"service", "trainers", "workers"})

THIRD_PARTY = {  # heavy or optional package -> files that may import it, or a folder
    "triton": ["triton_scores.py"],
    "vllm": ["vllm.py", "vllm_follower.py"],
    "sglang": ["hone_sglang/inside/"],
    "megatron": ["megatron/hone_megatron/", "hone_megatron/modules/"],
    "veomni": ["veomni/hone_veomni/"],
    "nemo_automodel": ["automodel/hone_automodel/"],
    "torchtitan": ["torchtitan/hone_torchtitan/"],
    "ray": ["ray.py", "ray_cluster.py"],
    "wandb": ["wandb.py"],
    "mlflow": ["mlflow.py"],
    "trackio": ["trackio.py"],
    "tensorboard": ["tensorboard.py"],
    "prometheus_client": ["prometheus.py"],
    "opentelemetry": ["opentelemetry.py"],
    "reasoning_gym": [],  # by name, in reasoning_gym_patches.py
    "math_verify": ["math.py"],
    "datasets": ["hf.py"],
    "modelscope": ["source.py"],
    "modelscope_hub": ["source.py"],
    "peft": ["peft_layers.py"],
    "flash_attn": ["packed.py"],
    "xxhash": ["byte_digest.py"],
}

LAZY = {  # function-level imports: file -> what it imports there, and why
    "plugins/ascend/hone_ascend/__init__.py": {"hone_megatron": "optional"},
    "hone/data/sources/hf.py": {"datasets": "optional"},
    "hone/engines/kernels/choice.py": {"hone": "the kernels, which import triton"},
    "hone/migration/shell/script.py": {"tree_sitter": "optional", "tree_sitter_bash": "optional"},
    "hone/models/files/context.py": {"gguf": "optional"},
    "hone/models/source.py": {"modelscope": "optional", "modelscope_hub": "its errors"},
}

HEAVY = {"torch", "transformers", "tokenizers", "safetensors", "numpy", "pyarrow", "pandas", "datasets", "jinja2"}


def _resolved(modules) -> Iterator[tuple]:
    """(module, import, the module that it reaches) for every import of hone, and of plug-ins if they are given."""
    names = {module.name for module in modules}
    fronts = {name.partition(".")[0] for name in names}
    for module in modules:
        for found in module.imports:
            target = found.target
            while target and target not in names:
                target = target.rpartition(".")[0]
            if found.package in fronts:
                yield module, found, target


def test_every_part_has_a_line_in_the_table(package):
    assert {module.part for module in package} <= set(MAY_IMPORT)


def test_imports_point_one_way(package):
    wrong = []
    for module, found, target in _resolved(package):
        part = target.split(".")[1] if "." in target else ""
        settings = target.endswith("settings") and module.part in SETTINGS_READERS
        if part not in MAY_IMPORT[module.part] | {module.part, ""} and not settings:
            wrong.append(f"{module.path}:{found.line}: {module.part} may not import {target}")
    assert wrong == []


def test_there_are_no_cycles(products):
    edges: dict[str, set[str]] = {module.name: set() for module in products}
    for module, found, target in _resolved(products):
        if not found.typing_only and target != module.name:
            edges[module.name].add(target)
    assert _cycle(edges) == []


def _cycle(edges: Mapping[str, set[str]]) -> list[str]:
    """The modules of one cycle, or nothing: modules that nothing imports any more are removed until none is left."""
    left = {name: set(targets) for name, targets in edges.items()}
    while True:
        imported = set().union(*left.values()) if left else set()
        free = [name for name in left if name not in imported or not left[name]]
        if not free:
            return sorted(left)
        for name in free:
            del left[name]
        left = {name: targets & set(left) for name, targets in left.items()}


def test_imports_inside_functions_stand_in_the_list(products):
    wrong = [
        f"{module.path}:{found.line}: {found.target} is imported inside a function"
        for module in products
        for found in module.imports
        if found.in_function and found.package not in LAZY.get(str(module.path), {})
    ]
    assert wrong == []


def test_the_list_of_lazy_imports_is_up_to_date(products):
    found = {(str(m.path), i.package) for m in products for i in m.imports if i.in_function}
    assert {(path, name) for path, names in LAZY.items() for name in names} == found


def _defined(tree: ast.Module) -> set[str]:
    """Every name that a module could give to who imports it."""
    names = {
        node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    }
    names |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom)]
    return names | {(alias.asname or alias.name).partition(".")[0] for node in imports for alias in node.names}


def test_what_is_imported_from_this_project_exists(python_files):
    """Also in files that a quick run of the tests does not import: tests of clusters, benchmarks, recipes."""
    modules = {module.name: _defined(module.tree) for module in python_files}
    folders = {".".join(name.split(".")[:end]) for name in modules for end in range(1, name.count(".") + 1)}
    missing = []
    for module in python_files:
        for node in module.nodes():
            if not isinstance(node, ast.ImportFrom) or (node.module or "").partition(".")[0] not in ("hone", "tests"):
                continue
            for name in (alias.name for alias in node.names):
                target = f"{node.module}.{name}"
                if target not in modules and target not in folders and name not in modules.get(str(node.module), ()):
                    missing.append(f"{module.path}:{node.lineno}: {target}")
    assert missing == []


def test_third_party_packages_stay_in_their_file(products):
    wrong = [
        f"{module.path}:{found.line}: {found.package} is imported outside {' and '.join(THIRD_PARTY[found.package])}"
        for module in products
        for found in module.imports
        if found.package in THIRD_PARTY
        and not {module.path.name, f"{'/'.join(module.path.parts[-3:-1])}/"} & {*THIRD_PARTY[found.package]}
    ]
    assert wrong == []


def test_nothing_imports_recipes_tests_or_benchmarks(products):
    wrong = [
        f"{module.path}:{found.line}: {found.target}"
        for module in products
        for found in module.imports
        if found.package in ("recipes", "tests", "benchmarks")
    ]
    assert wrong == []


def _modules_after(code: str) -> set[str]:
    listing = f"import sys\n{code}\nprint(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", listing], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


def test_settings_and_package_fronts_import_nothing_heavy(products):
    light = [
        m.name
        for m in products
        if m.name.endswith("settings") or m.path.name == "__init__.py" or m.part in LEVEL_0 - WITH_TORCH
    ]
    loaded = _modules_after("".join(f"import {name}\n" for name in light))
    assert loaded & HEAVY == set()


@pytest.mark.parametrize("arguments", [["--help"], ["config", "--help"], ["list", "--help"], ["--version"]])
def test_asking_for_help_imports_nothing_heavy(arguments):
    loaded = _modules_after(f"from hone.cli.main import main\nassert main({arguments!r}) == 0")
    assert loaded & HEAVY == set()


def test_showing_a_run_file_imports_nothing_heavy(root):
    recipes = [str(recipe) for recipe in sorted((root / "recipes").rglob("*.yaml")) if recipe.parent.name != "serve"]
    assert recipes
    code = f"""from hone.cli.main import main
for recipe in {recipes!r}:
    assert main(["config", recipe]) == 0
    heavy = {HEAVY!r} & {{name.partition(".")[0] for name in sys.modules}}
    assert not heavy, (recipe, heavy)"""
    assert _modules_after(code) & HEAVY == set()


@pytest.mark.parametrize("command", ["train", "sft", "prefer", "reward-model", "distill", "quickstart"])
def test_an_error_in_the_settings_is_shown_before_anything_heavy_is_imported(command, root):
    """`run.stepz` is unknown to every kind of run. The file is one of another kind, which is an error as well."""
    file = [] if command == "quickstart" else [str(root / "recipes/quickstart/grpo.yaml")]
    arguments = [command, *file, "run.stepz=1"]
    assert _modules_after(f"from hone.cli.main import main\nassert main({arguments!r}) == 2") & HEAVY == set()


def test_loading_settings_in_python_imports_no_models(root):
    code = f"import hone\nhone.load({str(root / 'recipes/quickstart/grpo.yaml')!r})"
    loaded = _modules_after(code)
    assert loaded & {"transformers", "accelerate", "peft", "sympy", "ray", "fastapi", "vllm"} == set()
