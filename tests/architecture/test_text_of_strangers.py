"""Text that a policy, a server or a stranger wrote is read in linear time.

Three tables: every regular expression of the package is one that reads such text, which is tried here with texts made
to be slow, one that reads text of the user's own, or one that the user wrote and that runs under a deadline. A new
expression in no table fails the first test, and a new setting or option that is an expression fails another.
"""

import ast
import gc
import importlib
import inspect
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace

import pytest

from hone.config import Config
from hone.data.answers import between_tags, fenced_blocks
from hone.data.images import _DATA_URL, _REMOTE
from hone.envs import PARSERS
from hone.envs.search import WORD
from hone.envs.tool_calls import split_thought
from hone.processes.frames import _decode, _deepest
from hone.processes.untrusted_json import parse_json
from hone.rewards import REWARDS
from hone.rewards.answers.choices import choice, chosen, letters_of_options
from hone.rewards.answers.inequalities import conditions, inequality_at_the_end
from hone.rewards.answers.notation import named_set, radians
from hone.rewards.answers.numerals import in_digits, scaled
from hone.rewards.answers.times import times
from hone.rewards.answers.units import quantity, unit_at_the_end
from hone.rewards.answers.words import clocks, has_numbers_and_names, is_words, letters, words
from hone.rewards.code import last_block
from hone.rewards.exact_match import exact_match
from hone.rewards.extraction import only_number
from hone.rewards.formulas import (
    after_final,
    answer_part,
    base_of,
    boxes,
    cents_at_the_end,
    clock_or_ratio,
    dollars_at_the_end,
    is_money,
    percentage,
    plain,
    prose,
)
from hone.rewards.gsm8k import gsm8k
from hone.rewards.judge import preference_in
from hone.rollout.servers.connection import CONSEQUENCE, first_error
from hone.tracking.trackers.console import _one_line
from hone.tracking.trackers.jsonl import STEP
from hone_environments import textworld_program
from hone_environments.openenv import action_in

SIZES = (500, 4_000, 32_000)  # characters: a cubic reader fails at the first, so that the others are never tried
MOST_S = 0.4  # of processor time for one text; linear ones take less than 0.05 s for the longest
COMMON = (" ", "\n", "\t", "a", "1", "1.", "1,", "-", '"', "\\", '\\"', "[", "{", "(", "<", ">", "`", "=", "é", "a b")
FUNCTIONS = ("compile", "search", "match", "fullmatch", "finditer", "findall", "sub", "subn", "split")


@dataclass(frozen=True)
class Reader:
    """Something that reads a stranger's text, with pieces that mean something to it; the first may begin a text."""

    read: Callable[[str], object]
    pieces: tuple[str, ...] = ()


def _parsers() -> dict[str, Reader]:
    pieces = {
        "hermes": ("<tool_call>", "</tool_call>", '"name": "a"', "<tool_call>{</tool_call>"),
        "qwen3_coder": ("<tool_call><function=a>", "</function>", "<parameter=a>", "</tool_call>", "</function> "),
        "llama3": ("<|python_tag|>", '{"name":', "{};", "{}"),
        "mistral": ("[TOOL_CALLS]", "[ARGS]", "[TOOL_CALLS][", "{}", "[CALL_ID]"),
        "pythonic": ("[f(a=", "f(a=1),", "-", "not ", "()", "[f(a=1),", "0x", "é=", "\r"),
        "none": (),
    }
    assert pieces.keys() == set(PARSERS), "a new parser of tool calls has pieces of its own here"
    return {f"tool calls: {name}": Reader(PARSERS.get(name), found) for name, found in pieces.items()}


def _told(text: str) -> object:
    return textworld_program._told(SimpleNamespace(feedback=text, admissible_commands=(), score=0, max_score=0), False)


def _formulas(text: str) -> None:
    boxes(answer_part(text))
    for read in (
        plain,
        prose,
        quantity,
        percentage,
        base_of,
        words,
        clock_or_ratio,
        clocks,
        is_words,
        after_final,
        is_money,
        cents_at_the_end,
        dollars_at_the_end,
        unit_at_the_end,
        conditions,
        inequality_at_the_end,
        has_numbers_and_names,
        letters,
        choice,
        chosen,
        letters_of_options,
        named_set,
        radians,
        in_digits,
        scaled,
        times,
    ):
        read(text)


READERS: dict[str, Reader] = {
    **_parsers(),
    "thoughts": Reader(split_thought, ("<think>", "</think>")),
    "JSON": Reader(parse_json, ('{"a":', "[1,", '"a",', "1e9", "\\u00")),
    "frames": Reader(lambda text: _decode(text.encode()), ('{"a":"', "[]", '"\\')),
    "depth of frames": Reader(lambda text: _deepest(text.encode()), ("[" * 300, "[]", '"\\')),
    "actions of OpenEnv": Reader(partial(action_in, field=None), ("```", "```json", "```\n", "{}")),
    "feedback of TextWorld": Reader(_told, (">", ">-= ", " =-", "-= ", "\n>", "\n/")),
    "words to search for": Reader(WORD.findall),
    "fenced blocks": Reader(
        lambda text: list(fenced_blocks(text)), ("```\n", "```a\n", "~~~\n", "````\n", "\r\n", " ```")
    ),
    "tags": Reader(partial(between_tags, tag="answer"), ("<answer>", "</answer>", "</answer><answer>")),
    "reward code": Reader(last_block, ("```python\n", "``` \n", "x\n", "~~~")),
    "reward gsm8k": Reader(
        partial(gsm8k, ground_truth="1", row={}),
        ("#### ", ".1", ",111", "#### 1\n", "$", "\\", "1e99 ", "1:2", "1/", "2 1/2 ", "½"),
    ),
    "numbers alone": Reader(only_number, ("$1", "½", "1e9", "%", "a ", "1/", "2 1/2 ")),
    "formulas": Reader(
        _formulas,
        (
            *("\\boxed{", "\\boxed 1", "}", "\\text{", "√(", "½", "1 1/2 ", "1e99 ", "1:", "$", "</a>", "1,\\!", "¹"),
            *("1 cent ", "1,1", "$1", "1 dollar ", "\\begin{cases}", "\\begin{cases}a\\end{cases}"),
            *(
                "x<1 or ",
                "x<1, ",
                "\\{x:x<",
                "\\text{ and }x>",
                "\\alpha{a ",
                "\\text{cm}^2",
                "1 1/2 %",
                "1\\frac12\\%",
                "1.1\\overline{1}",
                "1_2",
                "1\\times10^",
                "1.1\\times10^{1}",
                "a.m. ",
                *(
                    "[[1],",
                    "[1],",
                    "]1,2[",
                    "1^\\circ",
                    "\\sin 1^\\circ",
                    "1.1\\dot1",
                    "1.1(1)",
                    "1.111",
                    "pi",
                    "A) ",
                    "A, ",
                ),
                *("\\color{a}", "\\bf", "one ", "1 million ", "minus 1 ", "is minus ", "1:11 ", "<|a|>", "answer is "),
                *(
                    "1 dollar and 1 cent",
                    "答1",
                    "\\frac{\\text{m}}{",
                    " cm",
                    "m/",
                    "x**",
                    "2 x 10^",
                    "option A",
                    "\\mathbb R",
                ),
            ),
        ),
    ),
    "reward exact_match": Reader(
        partial(exact_match, ground_truth="1", row={}, tag="answer", collapse_spaces=True), ("<answer>", "</answer>")
    ),
    "rewards judge": Reader(preference_in, ('{"better":', "}", '{"better": "tie"}')),
    "log of a server": Reader(first_error, ("] ", ") ", "a.", "Error", "Error: ", ": error", "] a", ") a: error")),
    "errors that point elsewhere": Reader(CONSEQUENCE.search, ("See ", "See the ", "stack trace")),
    "sample in the console": Reader(partial(_one_line, width=80), ("<|", "<|im_start|>", "|>", "<|a")),
    "lines of metrics": Reader(lambda text: STEP.match(text.encode()), ('{"step": ', '{"step": 1')),
    "data URLs": Reader(_DATA_URL.match, ("data:", "data:a/", ";base64,")),
    "addresses of images": Reader(_REMOTE.match, ("a+", "://", "http://")),
}

# file -> the expressions in it that read what strangers wrote, and the reader that tries each
OF_ENVIRONMENTS = "plugins/environments/"  # the plug-in whose expressions read what programs of others write

TRIED: dict[str, dict[str, str]] = {
    "hone/data/answers.py": {"_FENCE": "fenced blocks", "_LANGUAGE": "fenced blocks"},
    "hone/data/images.py": {"_DATA_URL": "data URLs", "_REMOTE": "addresses of images"},
    "plugins/environments/hone_environments/gymnasium.py": {
        "COLOURS": "renderings",
        "1 without a name": "actions of Gymnasium",
    },
    "plugins/environments/hone_environments/textworld_program.py": {
        "STATUS": "feedback of TextWorld",
        "LETTERS": "feedback of TextWorld",
        "1 without a name": "feedback of TextWorld",
    },
    "hone/envs/search.py": {"WORD": "words to search for"},
    "hone/envs/tool_calls.py": {
        "5 without a name": "tool calls: hermes",  # and the other parsers, which are readers too
    },
    "hone/processes/frames.py": {"STRINGS": "depth of frames", "1 without a name": "depth of frames"},
    "hone/processes/untrusted_json.py": {"_TOKENS": "JSON"},
    "hone/rewards/exact_match.py": {"1 without a name": "reward exact_match"},
    "hone/rewards/extraction.py": {
        **dict.fromkeys(("_RUN", "_NUMBER", "_LIST", "_GOES_ON", "_TIME", "_DATE", "_MIXED"), "reward gsm8k"),
        **dict.fromkeys(("_SCIENTIFIC", "_POWER", "_GAPS", "_GROUPS", "_UNDER"), "reward gsm8k"),
        **dict.fromkeys(("_UNIT", "_JOINING", "2 without a name"), "numbers alone"),
    },
    "hone/rewards/answers/choices.py": dict.fromkeys(("_OPTION", "_ANOTHER", "_LETTERS", "_CHOSEN"), "formulas"),
    "hone/rewards/answers/notation.py": dict.fromkeys(
        (
            *("_LOOKS", "_ROWS", "_ONE_ROW", "_INTERVAL", "_FUNCTION", "_PARTS", "_DEGREES", "_DOTTED"),
            *("_IN_BRACKETS", "_GOES_ON", "_PI", "_MATHBB", "_NAMED"),
        ),
        "formulas",
    ),
    "hone/rewards/answers/numerals.py": dict.fromkeys(("_SCALED", "_DOLLARS_AND_CENTS", "_WORD", "_SIGN"), "formulas"),
    "hone/rewards/answers/times.py": {"_TIME": "formulas"},
    "hone/rewards/answers/units.py": dict.fromkeys(
        (
            *("_ONE_NUMBER", "_WITH_UNIT", "_SPACES", "_BRACES", "_FRACTION", "_AT_THE_END", "_TOKEN"),
            "_POWER_OF_UNIT",
        ),
        "formulas",
    ),
    "hone/rewards/answers/inequalities.py": dict.fromkeys(
        ("_SIGNS", "_THOUSANDS", "_UNEQUAL", "_WRITTEN_SIGNS", "_BUILDER", "_JOINED"), "formulas"
    ),
    "hone/rewards/answers/words.py": dict.fromkeys(
        ("CLOCK", "TEXT", "_DATE", "_NOON", "_LETTERS", "_COMMANDS", "7 without a name"), "formulas"
    ),
    "hone/rewards/formulas.py": dict.fromkeys(
        (
            *(
                "_MARKS",
                "_SCIENTIFIC",
                "_SQUARE",
                "_RATIO",
                "_MIXED",
                "_MIXED_PERCENT",
                "_REPEATING",
                "_TIMES_TEN",
                "_BASED",
                "_PERCENT",
                "_TAG",
                "_TOKEN",
                "_LABEL",
                "_STARS",
                "_EAST_ASIAN",
            ),
            *(
                "_CASES",
                "_MONEY",
                "_CENTS",
                "_DOLLARS",
                "_ROOT",
                "_RAISED",
                "_FINAL",
                "10 without a name",
            ),
        ),
        "formulas",
    ),
    "hone/rollout/servers/connection.py": {"CAUSE": "log of a server", "CONSEQUENCE": "errors that point elsewhere"},
    "hone/tracking/report/rundata.py": {"_SAMPLE": "lines of metrics"},
    "hone/tracking/trackers/console.py": {"_TEMPLATE_MARKS": "sample in the console"},
    "hone/tracking/trackers/jsonl.py": {"STEP": "lines of metrics"},
}
OF_THE_USER: dict[str, str] = {  # file -> whose text its expressions read
    "hone/cli/": "arguments, and what the machine and the installed packages say of themselves",
    "hone/composition.py": "run files",
    "hone/config_errors.py": "run files, and errors about them",
    "hone/data/chat_template.py": "special tokens of chat templates",
    "hone/data/templates/": "chat templates, and marks made of their special tokens",
    "hone/envs/functions.py": "docstrings of the user's tools",
    "hone/migration/": "scripts of another framework, which their owner migrates",
    "hone/models/files/left_out.py": "names of weights, read by expressions of transformers",
    "hone/models/source.py": "run files",
    "hone/platforms/": "versions of drivers",
    "hone/rollout/adapters.py": "names of modules",
    "hone/runtime/ray_cluster.py": "errors of Ray",
    "hone/tracking/base.py": "names of metrics",
    "hone/trainers/exports/": "names of models in run files, and of repositories in arguments",
    "hone/tracking/catalogue.py": "names of metrics",
    "hone/tracking/names.py": "names of metrics",
    "hone/tracking/report/build.py": "hone's own page",
    "hone/tracking/report/charts.py": "names of metrics",
    "hone/tracking/trackers/prometheus.py": "names of metrics",
}
WITH_A_DEADLINE: dict[str, set[str]] = {  # file -> expressions of a user, which only the package regex can bound
    "hone/trainers/policy/evaluation.py": {"self._pattern"},
    "hone/trainers/policy/settings.py": {"1 without a name"},  # compiled to see whether it can be
}
EXPRESSIONS_OF_USERS = {"PolicyEvaluationConfig.vote_pattern"}  # settings; each is in a file of WITH_A_DEADLINE


def _own(node: ast.AST) -> Iterator[ast.AST]:
    """What a statement consists of, without the statements in it."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.stmt | ast.excepthandler | ast.match_case):
            yield child
            yield from _own(child)


def _expressions(module) -> Iterator[str]:
    """The name of each regular expression that a module keeps, and how many others it has."""
    others = 0
    for statement in ast.walk(module.tree):
        if not isinstance(statement, ast.stmt):
            continue
        for node in _own(statement):
            called = node.func if isinstance(node, ast.Call) else None
            if not isinstance(called, ast.Attribute) or not isinstance(called.value, ast.Name):
                continue
            if called.value.id in ("re", "regex") and called.attr in FUNCTIONS:
                if isinstance(statement, ast.Assign) and called.attr == "compile":
                    yield ast.unparse(statement.targets[0])
                else:
                    others += 1
    if others:
        yield f"{others} without a name"


def test_expressions_are_written_where_they_are_found(package, plugins):
    """`from re import search` would hide an expression from these tests."""
    hidden = r"^\s*(?:from (?:re|regex) import|import (?:re|regex) as)"
    assert [
        str(one.path)
        for one in (*package, *plugins)
        if re.search(hidden, one.path.read_text(encoding="utf-8"), re.MULTILINE)
    ] == []


def test_every_expression_is_tried_or_reads_the_users_own_text(package, plugins):
    unknown, seen = [], set()
    for module in (*package, *(one for one in plugins if str(one.path).startswith(OF_ENVIRONMENTS))):
        path = str(module.path)
        tried = TRIED.get(path, {})
        whose = [name for name in OF_THE_USER if path.startswith(name)]
        for name in _expressions(module):
            seen |= {(path, name), *whose}
            if not whose and name not in tried and name not in WITH_A_DEADLINE.get(path, ()):
                unknown.append(f"{path}: {name}")
    assert not unknown, f"who writes the text that these read? add each to TRIED or OF_THE_USER: {unknown}"
    tables = [*TRIED.items(), *WITH_A_DEADLINE.items()]
    stale = [(path, name) for path, found in tables for name in found if (path, name) not in seen]
    assert not stale + [name for name in OF_THE_USER if name not in seen], f"these are gone: {stale}"


def test_expressions_of_users_run_under_a_deadline(package):
    """In the files that run them, a search without `timeout` is an error."""
    for module in package:
        if str(module.path) not in WITH_A_DEADLINE:
            continue
        searches = [
            node
            for node in module.nodes()
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in FUNCTIONS
            and node.func.attr != "compile"
            and not isinstance(node.func.value, ast.Constant)
        ]
        unbounded = [ast.unparse(one) for one in searches if "timeout" not in {word.arg for word in one.keywords}]
        assert not unbounded, f"{module.path}: {unbounded}"


@pytest.mark.filterwarnings("ignore::SyntaxWarning")  # of the packages behind rewards, when Python compiles them first
def test_every_setting_that_is_an_expression_is_known(package):
    found = set()
    for module in package:
        if not module.name.endswith("settings"):
            continue
        for _, cls in inspect.getmembers(importlib.import_module(module.name), inspect.isclass):
            if issubclass(cls, Config) and cls.__module__ == module.name:
                for name, info in cls.model_fields.items():
                    if re.search(r"regular expression|regex", f"{name} {info.description}"):
                        found.add(f"{cls.__name__}.{name}")
    options = [f"{name}: {option}" for name in REWARDS for option in inspect.signature(REWARDS.get(name)).parameters]
    assert found == EXPRESSIONS_OF_USERS
    assert not [one for one in options if re.search("pattern|regex|expression", one.partition(": ")[2])]


def test_every_reader_of_the_table_exists():
    named = {reader for found in TRIED.values() for reader in found.values()}
    assert named <= READERS.keys() | {"renderings", "actions of Gymnasium"}
    others = {"math", "pairwise_judge", "reasoning_gym"}  # by their packages, in a process; judges share their reader
    assert {f"reward {name}" for name in set(REWARDS) - others - {"judge"}} <= READERS.keys()


def _readers() -> dict[str, Reader]:
    gymnasium = pytest.importorskip("gymnasium")
    from hone_environments.gymnasium import action_in as gymnasium_action
    from hone_environments.gymnasium import in_brackets

    taken = partial(gymnasium_action, space=gymnasium.spaces.Discrete(20), names=[])
    colours = ("\x1b[1m", "\x1b[0m", "\x1b[", ";", "\x1b[1m\x1b[0m")
    return {"renderings": Reader(in_brackets, colours), "actions of Gymnasium": Reader(taken, ("1 ", "19", "-1"))}


@pytest.fixture(scope="module", autouse=True)
def _without_the_garbage_of_others():
    """A full collection of what other tests hold takes longer than any reader."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.parametrize("name", [*READERS, "renderings", "actions of Gymnasium"])
def test_time_is_linear_in_what_was_written(name):
    reader = READERS.get(name) or _readers()[name]
    first = reader.pieces[:1]
    for before in ("", *first):
        for piece in (*COMMON, *reader.pieces):
            for after in ("", "x", *first):
                _try(reader, before, piece, after)


def _try(reader: Reader, before: str, piece: str, after: str) -> None:
    for size in SIZES:
        text = before + piece * (size // len(piece)) + after
        began = time.thread_time()
        with suppress(ValueError, RuntimeError):  # refused
            reader.read(text)
        seconds = time.thread_time() - began
        assert seconds < MOST_S, f"{before!r} + {piece!r} * {size // len(piece)} + {after!r} took {seconds:.1f} s"
