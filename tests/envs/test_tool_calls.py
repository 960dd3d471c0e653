"""What a policy writes is parsed in linear time and bounded depth, and a broken call is a call with an error."""

import pytest

from hone.envs import PARSERS
from hone.envs.agents.sessions import normal
from hone.envs.tool_calls import Call, Said, hermes, llama3, mistral, pythonic, qwen3_coder, split_thought
from hone.processes.untrusted_json import DEEPEST, parse_json
from hone.weights.transports.bucketed.wire import BrokenMessage, decode

CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
DEEP = "[" * 100_000
WHOLE = {  # parser -> one call f(x=1, y="é\"]")
    "hermes": '<tool_call>{"name": "f", "arguments": {"x": 1, "y": "é\\"]"}}</tool_call>',
    "qwen3_coder": (
        '<tool_call>\n<function=f>\n<parameter=x>\n1\n</parameter>\n<parameter=y>\né"]\n</parameter>\n</function>\n'
        "</tool_call>"
    ),
    "llama3": '<|python_tag|>{"name": "f", "parameters": {"x": 1, "y": "é\\"]"}}',
    "mistral": '[TOOL_CALLS][{"name": "f", "arguments": {"x": 1, "y": "é\\"]"}}]',
    "pythonic": '[f(x=1, y="é\\"]")]',
}


def calls(parse, text):
    return [(one.name, dict(one.arguments), bool(one.error)) for one in parse(text)[1]]


@pytest.mark.parametrize("name", WHOLE)
def test_each_parser_reads_a_call_and_its_arguments(name):
    x = "1" if name == "qwen3_coder" else 1  # its arguments are text
    assert calls(PARSERS.get(name), WHOLE[name]) == [("f", {"x": x, "y": 'é"]'}, False)]


@pytest.mark.parametrize("name", WHOLE)
def test_a_call_that_is_cut_off_anywhere_is_broken_or_text_but_never_another_call(name):
    parse, text = PARSERS.get(name), WHOLE[name]
    begun = {"hermes": 11, "qwen3_coder": 11, "llama3": 14, "mistral": 12, "pythonic": 4}[name]
    for end in range(begun, len(text)):
        content, found = parse(text[:end])
        assert len(found) == 1, text[:end]
        assert found[0].error, text[:end]
        assert not content
        assert not Said(content, calls=found).whole


@pytest.mark.parametrize("name", list(PARSERS))
def test_text_without_a_call_is_content(name):
    for text in ("", "42", "a [b] {c}", 'x = {"name"', "[1, 2]"):
        assert PARSERS.get(name)(text) == (text, ())


def test_several_calls_keep_their_order_and_broken_ones_do_not_hide_others():
    text = f"a {CALL} b <tool_call>{DEEP}</tool_call> c {CALL}"
    content, found = hermes(text)
    assert content == "a  b  c"
    assert [(one.name, one.error[:30]) for one in found] == [
        ("f", ""),
        ("", "not JSON: the JSON text is nes"),
        ("f", ""),
    ]
    assert found[1].text == f"<tool_call>{DEEP}</tool_call>"
    doubled = calls(hermes, f"<tool_call>{CALL}")
    assert doubled == [("f", {}, True)]  # the inner mark makes it no JSON
    assert calls(llama3, '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": "};"}}') == [
        ("f", {}, False),
        ("g", {"a": "};"}, False),
    ]
    assert calls(mistral, 'x[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}') == [
        ("f", {"a": 1}, False),
        ("g", {}, False),
    ]
    assert calls(pythonic, "[f(a=[1, {'b': None}]), g()]") == [("f", {"a": [1, {"b": None}]}, False), ("g", {}, False)]


@pytest.mark.parametrize(
    ("parse", "text", "error"),
    [
        (hermes, "<tool_call>[1]</tool_call>", 'a call should be an object with "name"'),
        (hermes, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "arguments should be an object, found list"),
        (hermes, '<tool_call>{"name": "f", "arguments": "{"}</tool_call>', "arguments are not JSON"),
        (hermes, '<tool_call>{"name": "f"', "</tool_call> is missing"),
        (qwen3_coder, "<tool_call><function=f><parameter=a>1</function></tool_call>", "is not closed"),
        (llama3, "<|python_tag|>print(1)", "not JSON"),
        (mistral, "[TOOL_CALLS]f[ARGS]{", "arguments are not JSON"),
        (mistral, "[TOOL_CALLS][]", 'a call should be an object with "name"'),
        (qwen3_coder, "<tool_call><function= ></function></tool_call>", "the name in <function=NAME> is missing"),
        (mistral, "[TOOL_CALLS][1]", 'a call should be an object with "name"'),
        (hermes, '<tool_call>{"name": "f", "arguments": {"a": "\\ud800"}}</tool_call>', "half a character"),
        (hermes, '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>', "half a character"),
        (mistral, '[TOOL_CALLS]f[ARGS]{"a": 1e999}', "a number that is not finite"),
        (llama3, '<|python_tag|>{"name": "f", "parameters": {"a": NaN}}', "a number that is not finite"),
        (pythonic, "[f(a={(1, 2): 3})]", "keys must be str"),
        (pythonic, "[f(a=0x" + "f" * 5000 + ")]", "an integer of more than 1,000 digits"),
        (
            hermes,
            '<tool_call>{"name": "f", "arguments": {"a": [1' + "0" * 2000 + "]}}</tool_call>",
            "an integer of more",
        ),
        (pythonic, "[f(a={1, 2})]", "not JSON serializable"),
        (pythonic, "[f(a=b'x')]", "not JSON serializable"),
        (pythonic, "[f(1)]", "a call is written as name(argument=value, ...)"),
        (pythonic, "[f(a=b)]", "not a list of calls"),
        (pythonic, "[f(a=" + DEEP, "too long or too deep"),
    ],
)
def test_what_is_wrong_with_a_broken_call(parse, text, error):
    (call,) = parse(text)[1]
    assert error in call.error


@pytest.mark.parametrize(
    "text",
    ["<tool_call>" + "\n" * 400_000, "<tool_call>" * 30_000, '<tool_call>"' + '\\"' * 200_000 + "</tool_call>"],
    ids=["newlines", "marks", "quotes"],
)
@pytest.mark.parametrize("name", list(PARSERS))
def test_time_is_linear_in_what_was_written(name, text):
    """1,500 newlines took 6 s in an expression that was cubic; this would never end."""
    PARSERS.get(name)(text)


def test_calls_in_python_are_shown_as_they_were_written():
    found = pythonic('[f(a="é"),\r\n g(b=(1, {2: None}))]')[1]
    assert [one.text for one in found] == ['[f(a="é")]', "[g(b=(1, {2: None}))]"]
    assert [dict(one.arguments) for one in found] == [{"a": "é"}, {"b": [1, {"2": None}]}], "as JSON has it"


def test_thoughts_are_apart_from_the_answer():
    assert split_thought("<think>\ntwo\n</think>\n\n4") == ("two", "4")
    assert split_thought("two</think>4") == ("two", "4"), "the template may write the first mark"
    assert split_thought("<think>two") == ("two", ""), "a thought that is cut off is no answer"
    assert split_thought("a < b") == ("", "a < b")


def test_nesting_is_refused_before_it_is_parsed():
    nested = "[" * DEEPEST + "]" * DEEPEST
    assert parse_json(nested) is not None
    assert parse_json('{"a": "' + "[" * 1000 + '"}') == {"a": "[" * 1000}, "in a string it is text"
    with pytest.raises(ValueError, match="nested deeper than 64 levels"):
        parse_json(f"[{nested}]")
    with pytest.raises(BrokenMessage, match="not JSON"):
        decode(DEEP.encode())
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": DEEP}}]}
    assert normal(message)["tool_calls"][0]["function"]["arguments"] == DEEP
    assert Call("f").arguments == {}
