"""What things are called, what may not be written anywhere, and waits that could last for ever."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

SAY_NOTHING = {"util", "utils", "helper", "helpers", "common", "core", "manager", "managers", "impl", "misc", "stuff"}
OTHER_WORDS_FOR_ROLLOUT = {"sampler", "samplers", "inference", "inferencer"}

NAMES_ALLOWED: dict[str, str] = {  # "path: name" -> reason
    "hone/weights/sync.py: CheckpointEngineManager": "what the field calls the part that drives weight syncs",
}

TEXT_SUFFIXES = {
    ".py",
    ".md",
    ".yaml",
    ".yml",
    ".toml",
    ".cfg",
    ".txt",
    ".lock",
    ".sh",
    ".html",
    ".js",
    ".css",
    ".json",
}
SKIPPED_FOLDERS = {".git", "runs", "build", "dist", "site", "wandb", "mlruns", "__pycache__", "results"}


def _words(name: str) -> set[str]:
    """The words of a snake_case or CamelCase name."""
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)}


def _defined(module) -> Iterator[str]:
    """Every name that a module gives to something of its own."""
    for node in module.nodes():
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def _project_files(root: Path) -> list[Path]:
    """Every text file that belongs to the project: what git would carry, or all of them where there is no git."""
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "ls-files", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
        paths = [root / name for name in listed]
    else:
        paths = [p for p in root.rglob("*") if not any(_skipped(part) for part in p.relative_to(root).parts)]
    known = TEXT_SUFFIXES | {""}
    return [path for path in paths if path.is_file() and path.suffix in known]


def _skipped(part: str) -> bool:
    return part in SKIPPED_FOLDERS or part.startswith(".venv") or part.endswith((".egg-info", "_cache"))


def test_files_and_folders_say_what_they_hold(python_files):
    wrong = {
        str(module.path)
        for module in python_files
        for part in module.path.with_suffix("").parts
        if _words(part) & SAY_NOTHING
    }
    assert wrong == set()


def test_classes_and_functions_say_what_they_do(products):
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    named = [(module, node.name) for module in products for node in module.nodes() if isinstance(node, kinds)]
    wrong = {f"{module.path}: {name}" for module, name in named if _words(name) & SAY_NOTHING}
    assert wrong - set(NAMES_ALLOWED) == set()


def test_one_word_for_one_concept(products):
    wrong = {
        f"{module.path}: {name}"
        for module in products
        for name in [*_defined(module), *module.path.with_suffix("").parts]
        if _words(name) & OTHER_WORDS_FOR_ROLLOUT
    }
    assert wrong - set(NAMES_ALLOWED) == set()


# ------------------------------------------------------------------------------------------------- what is dangerous

BANNED_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
BANNED_CALLS = {
    "eval": "runs text as code",
    "exec": "runs text as code",
    "torch.load": "unpickles",
    "torch.save": "pickles",
    "numpy.load": "may unpickle",
    "np.load": "may unpickle",
    "os.system": "a shell, and no deadline",
    "yaml.unsafe_load": "builds any object",
    "yaml.full_load": "builds objects",
}
BANNED_METHODS = {"read_pickle", "to_pickle", "recv_pyobj", "send_pyobj"}
BANNED_KEYWORDS = {("weights_only", False), ("allow_pickle", True), ("trust_remote_code", True), ("shell", True)}
EVERY_INTERFACE = re.compile(r"\b0\.0\.0\.0\b|\[::\]")


def test_nothing_is_unpickled_or_run_as_code(products):
    wrong = []
    for module in products:
        wrong += [f"{module.path}:{i.line}: {i.target}" for i in module.imports if i.package in BANNED_MODULES]
        for node in module.nodes():
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            given = {(k.arg, k.value.value) for k in node.keywords if isinstance(k.value, ast.Constant)}
            if called in BANNED_CALLS or called.rpartition(".")[2] in BANNED_METHODS:
                wrong.append(f"{module.path}:{node.lineno}: {called}: {BANNED_CALLS.get(called, 'pickles')}")
            wrong += [f"{module.path}:{node.lineno}: {name}={value}" for name, value in given & BANNED_KEYWORDS]
    assert wrong == []


def test_nothing_listens_on_every_interface(products):
    wrong = [str(module.path) for module in products if EVERY_INTERFACE.search(module.text)]
    assert wrong == []


def test_failures_are_not_swallowed(products):
    wrong = []
    for module in products:
        for node in module.nodes():
            if isinstance(node, ast.ExceptHandler):
                kinds = ast.unparse(node.type) if node.type else "everything"
                broad = node.type is None or kinds in ("Exception", "BaseException")
                silent = all(isinstance(line, ast.Pass | ast.Continue | ast.Constant) for line in node.body)
                if node.type is None or (broad and silent):
                    wrong.append(f"{module.path}:{node.lineno}: except {kinds} does nothing")
    assert wrong == []


# ------------------------------------------------------------------------------------------- waits without a deadline

ENDLESS = {"join", "wait", "result", "recv", "communicate", "acquire", "get", "put", "recv_json", "recv_multipart"}

WAITS_ALLOWED = {  # "file: call" -> who ends it
    "hone/cli/score.py: waiting.popleft().result()": "the reward pool gives every call a deadline",
    "hone/envs/episode.py: task.result()": "the task is done",
    "hone/models/attention/packed.py: _CURRENT.get()": "a context variable",
    "hone/rollout/builtin/generic.py: _CURRENT.get()": "a context variable",
    "hone/envs/agents/sessions.py: self._released.wait()": "asyncio; every request that ends sets it",
    "hone/rewards/pool.py: self._changed.wait()": "every change of the pool notifies it",
    "hone/service/futures.py: entry.done.wait()": "asyncio; within the deadline of the question",
    "hone/service/sampling.py: self._wake.wait()": "asyncio; every request sets it; the service cancels it",
    "hone/service/training.py: self._wake.wait()": "asyncio; every command sets it; the service cancels it",
    "hone/processes/request_loop.py: self._inbox.get()": "the process ends with hone, which closes the socket",
    "hone/sandboxes/base.py: free.acquire()": "asyncio; within the deadline of a seat",
    "hone/workers/tenants/served.py: self._ended.wait()": "asyncio; each request to the server has a deadline",
    "hone/rollout/router.py: seat.result()": "the seat is given",
    "hone/workers/scoring.py: task.result()": "the task is done",
    "hone/weights/transports/bucketed/channel.py: self._changed.wait()": "asyncio; within the deadline of the sync",
    "hone/weights/transports/bucketed/channel.py: self._reader.result()": "the task is done",
    "hone/weights/transports/bucketed/channel.py: self._socket.recv_multipart()": "ended by close; else after a poll",
    "hone/weights/in_process.py: self._changed.wait()": "asyncio; within the deadline of the sync",
    "hone/tracking/trackers/background.py: self._items.get()": "a daemon thread that exists to wait for work",
}


def test_every_wait_has_a_deadline_or_stands_in_the_list(products):
    wrong = []
    for module in products:
        for node in module.nodes():
            bare = isinstance(node, ast.Call) and not node.args and not node.keywords
            if bare and isinstance(node.func, ast.Attribute) and node.func.attr in ENDLESS:
                wrong.append(f"{module.path}: {ast.unparse(node)}")
    assert sorted(set(wrong) - set(WAITS_ALLOWED)) == []


def test_subprocesses_have_a_deadline(products):
    wrong = []
    for module in products:
        for node in module.nodes():
            if isinstance(node, ast.Call) and ast.unparse(node.func).startswith("subprocess."):
                runs = node.func.attr in ("run", "check_output", "check_call", "call")  # type: ignore[attr-defined]
                if runs and "timeout" not in {keyword.arg for keyword in node.keywords}:
                    wrong.append(f"{module.path}:{node.lineno}")
    assert wrong == []


SESSIONS = {  # aiohttp's own deadline, five minutes, is none of hone's
    "hone/processes/http_client.py": "a session without limits",
    "hone/rollout/servers/connection.py": "over a server's own socket; each request has a deadline",
}


def test_http_sessions_have_no_deadline_that_nobody_chose(products):
    opened = {str(m.path) for m in products for node in m.nodes() if _is_session(node)}
    assert opened == set(SESSIONS)


def _is_session(node):
    return isinstance(node, ast.Call) and ast.unparse(node.func).endswith("ClientSession")


# ---------------------------------------------------------------------------------------- what no file should speak of

SPOKEN_OF = {
    "a package registry's host": r"py[p]i\.(org|python)|python[h]osted|npm[j]s|registry\.[a-z]+\.(com|org|io)",
    "a path of one machine": r"(?<![\w.~/])/(work|farm|root|opt|mnt|home|Users)/",
    "a document that is not in the project": r"DESIGN(\.md|\b section)|FIELD[-]NOTES|ALGO[R]ITHMS\.md|the [b]rief\b",
    "unfinished work": r"\b(TO[D]O|FIX[M]E|X[X]X)\b",
    "an emoji": "[\U0001f300-\U0001faff]",
}


@pytest.mark.parametrize("subject", SPOKEN_OF)
def test_the_project_speaks_of_itself_alone(root, subject):
    pattern = re.compile(SPOKEN_OF[subject])
    wrong = []
    for path in _project_files(root):
        if path == Path(__file__):
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            if pattern.search(line):
                wrong.append(f"{path.relative_to(root)}:{number}: {line.strip()[:100]}")
    assert wrong == []


def test_docstrings_begin_with_an_instruction_or_a_noun(python_files):
    """A clause such as "What a service says" completes the name of a function, and has to be read twice."""
    clause = re.compile(r"(What|Which|How|Whether|Where|Who|Whose)\b")
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = [
        f"{module.path}: {text.splitlines()[0]}"
        for module in python_files
        if "tests" not in module.path.parts  # where whole sentences begin so, too
        for node in ast.walk(module.tree)
        if isinstance(node, documented) and (text := ast.get_docstring(node)) and clause.match(text)
    ]
    assert found == []
