"""reasoning-gym without pycosat: everything but the puzzles that need it; and whether the patch is still needed."""

import subprocess
import sys

HIDE = "import sys; sys.modules['pycosat'] = None  # Python's own way to say that a module is not there\n"


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", HIDE + code], capture_output=True, text=True, timeout=120)


def test_tasks_are_made_and_scored_without_the_sat_solver():
    done = run(
        "from hone.data.sources.reasoning_gym_patches import load_package\n"
        "assert load_package() is load_package()\n"
        "package = load_package()\n"
        "row = package.create_dataset('number_sorting', seed=1, size=1)[0]\n"
        "print(package.get_score_answer_fn('number_sorting')(row['answer'], row))\n"
    )
    assert done.stdout == "1.0\n", done.stderr


def test_what_needs_the_solver_says_so():
    done = run(
        "from hone.data.sources.reasoning_gym_patches import load_package\n"
        "load_package()\n"
        "import pycosat\n"
        "try: pycosat.solve([[1]])\n"
        "except ImportError as error: print(error)\n"
    )
    assert done.stdout == "this logic puzzle needs the package pycosat, which is not installed\n", done.stderr


def test_the_patch_is_still_needed():
    """When this fails, reasoning-gym imports without pycosat: delete the patch and requirements/compiled.lock."""
    assert "import of pycosat halted" in run("import reasoning_gym").stderr
