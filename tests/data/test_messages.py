"""Messages in one form: what data files and clients write in several ways, and what only one of them can mean."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from hone.data.columns import PromptReader, SampleReader
from hone.data.messages import MessageError, normal_message, normal_messages, normal_tool
from hone.data.sources.base import DataError

PLAIN = {"role": "assistant", "content": "", "tool_calls": [
    {"type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo"}}}
]}  # fmt: skip
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {
    "type": "object",
    "properties": {"city": {"type": "string"}, "day": {"type": ["string", "null"]}, "unit": {"type": "string"}},
    "required": ["city"],
}}}  # fmt: skip
ADD = {"type": "function", "function": {"name": "add", "parameters": {
    "type": "object", "properties": {"a": {"type": "integer"}, "unit": {"type": "string"}},
}}}  # fmt: skip


def calling(call):
    return {"role": "assistant", "content": None, "tool_calls": call}


@pytest.mark.parametrize(
    "written",
    [
        calling([{"function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}]),
        calling([{"name": "weather", "arguments": {"city": "Oslo"}}]),
        calling([{"function": {"name": "weather", "arguments": ""}, "arguments": {"city": "Oslo"}}]),
        calling([json.dumps({"name": "weather", "arguments": {"city": "Oslo"}})]),
        calling(json.dumps([{"type": "function", "function": {"name": "weather", "arguments": '{"city":"Oslo"}'}}])),
        {"role": "assistant", "content": None, "function_call": {"name": "weather", "arguments": '{"city": "Oslo"}'}},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Oslo"}}'},
        {"role": "assistant", "content": [{"type": "tool_use", "name": "weather", "input": {"city": "Oslo"}}]},
        calling([{"function": {"name": "weather", "arguments": json.dumps('{"city": "Oslo"}')}}]),
        calling(json.dumps(json.dumps([{"name": "weather", "arguments": {"city": "Oslo"}}]))),
    ],
)
def test_a_call_is_the_same_however_it_is_written(written):
    assert normal_message(written) == PLAIN


def test_arguments_that_are_missing_are_none():
    for nothing in (None, "", "{}", {}):
        call = normal_message(calling([{"function": {"name": "now", "arguments": nothing}}]))["tool_calls"][0]
        assert call["function"] == {"name": "now", "arguments": {}}


def nested(levels):
    found = {}
    for _ in range(levels):
        found = {"a": found}
    return found


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (
            calling([{"function": {"name": "f", "arguments": "{city"}}]),
            "arguments of a call of f are text, but no JSON",
        ),
        (calling([{"function": {"name": "f", "arguments": "[1]"}}]), "should be an object, found \\[1\\]"),
        (calling([{"function": {"arguments": {}}}]), "a tool call should have a function with a name"),
        (calling([{"function": {"name": "f", "arguments": nested(5_000)}}]), "nested deeper than 64 levels"),
        ({**calling([{"name": "f"}]), "function_call": {"name": "f"}}, "has tool_calls and function_call"),
        (
            calling([{"name": "f", "arguments": {"a": 1}, "input": {"a": 2}}]),
            "a call of f has arguments and input, which",
        ),
        (
            calling([{"function": {"name": "f", "arguments": {"a": 1}}, "arguments": {}, "args": {"a": 2}}]),
            "a call of f has arguments and args beside its function, which differ",
        ),
        (
            {"role": "assistant", "content": "4", "reasoning": "x", "thinking": "y"},
            "reasoning and thinking, which differ",
        ),
        ({"from": "gpt", "value": "4", "content": "5"}, "a message has value and content, which differ; leave one"),
        (calling("{"), "tool_calls is text, but no JSON"),
        ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "or an image, found"),
        ({"role": "user", "content": 7}, "should be text or a list of parts, found 7"),
        ({"role": "assistant", "content": "x", "weight": 0.5}, "weight of a message should be 0 or 1 .* found 0.5"),
        ({"role": "user"}, "a message of role 'user' has no content"),
        ("hi", "should have a role and a content, found 'hi'"),
        ({"role": " ", "content": "x"}, "should have a role and a content"),
        ({"from": "function_call", "value": "add(1)"}, "so its value should be the JSON of a call .* is it from gpt"),
        (
            {"role": "assistant", "content": [{"type": "tool_use", "name": "f"}, "4"]},
            "in the order tool_use, None; chat",
        ),
        (
            {"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]},
            "only their provider can read",
        ),
        (
            {"role": "assistant", "reasoning": "a", "content": [{"type": "thinking", "thinking": "b"}]},
            "has thoughts in a field and in its content",
        ),
        ({"from": ["human"], "value": "x"}, "a message is from .*human.*; known are human"),
    ],
)
def test_a_message_that_cannot_be_understood_is_a_clear_error(message, said):
    with pytest.raises(MessageError, match=said):
        normal_message(message)


@pytest.mark.parametrize("name", ["arguments", "parameters", "input", "args"])
def test_arguments_have_the_names_of_several_libraries(name):
    call = {"name": "weather", name: {"city": "Oslo"}}
    assert normal_message(calling([call])) == PLAIN
    assert normal_message(calling([{"name": "weather", name: '{"city": "Oslo"}'}])) == PLAIN


@pytest.mark.parametrize("arguments", [{"city": float("nan")}, '{"city": [{"a": Infinity}]}'])
def test_arguments_with_a_number_that_json_lacks_are_a_clear_error(arguments):
    call = {"name": "weather", "arguments": arguments}
    with pytest.raises(MessageError, match=r"arguments of a call of weather have a number that JSON does not have: \{"):
        normal_message(calling([call]))
    assert normal_message(calling([call]), lenient=True)["tool_calls"]  # a model wrote it


def test_thoughts_are_text_and_an_empty_name_of_them_hides_no_other():
    answer = {"role": "assistant", "content": "4", "reasoning_content": "", "reasoning": "2 and 2."}
    assert normal_message(answer)["reasoning_content"] == "2 and 2."
    assert normal_message({**answer, "thinking": "2 and 2."})["reasoning_content"] == "2 and 2."
    with pytest.raises(MessageError, match=r"should be text, found \[\{'text': 'hm'\}\]"):
        normal_message({**answer, "reasoning": [{"text": "hm"}]})


@pytest.mark.parametrize("flag", [
    {"weight": 0}, {"weight": 0.0}, {"trainable": False}, {"loss_mask": 0}, {"train": 0}, {"loss_weight": 0},
    {"loss_scale": 0.0},
])  # fmt: skip
def test_an_answer_that_a_data_set_excludes_is_marked(flag):
    assert normal_message({"role": "assistant", "content": "x", **flag})["trainable"] is False
    assert normal_message({"role": "assistant", "content": "x", **dict.fromkeys(flag, 1)}) == {
        "role": "assistant",
        "content": "x",
    }
    assert "trainable" not in normal_message({"role": "user", "content": "x", **flag})


def test_roles_parts_and_thoughts_have_one_form():
    for written, role in (("developer", "system"), ("Assistant", "assistant"), (" USER ", "user"), ("Narrator",) * 2):
        assert normal_message({"role": written, "content": "x"})["role"] == role
    assert normal_message({"role": "model", "content": "x"}) == {"role": "assistant", "content": "x"}
    assert normal_message({"from": "Human ", "value": "x"}) == {"role": "user", "content": "x"}
    parts = [{"type": "text", "text": "a", "image": None}, "b", {"type": "input_text", "text": "c"}]
    assert normal_message({"role": "user", "content": parts})["content"] == "abc"
    image = {"type": "image", "image": "x.png"}
    assert normal_message({"role": "user", "content": [image, "b"]})["content"] == [
        image,
        {"type": "text", "text": "b"},
    ]
    for name in ("reasoning_content", "reasoning", "thinking"):
        assert normal_message({"role": "assistant", "content": "x", name: "hm"})["reasoning_content"] == "hm"


def test_blocks_become_thoughts_calls_and_messages_of_tools():
    thought = {"type": "thinking", "thinking": "hm", "signature": "x"}
    call = {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Oslo"}}
    said = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "rain"}]}
    answer = {"role": "assistant", "content": [thought, {"type": "text", "text": "I look."}, call]}
    found = normal_messages([answer, {"role": "user", "content": [said, said, {"type": "text", "text": "And?"}]}])
    asked = {**PLAIN["tool_calls"][0], "id": "1"}
    result = {"role": "tool", "content": "rain", "tool_call_id": "1"}
    assert found == (
        {"role": "assistant", "content": "I look.", "reasoning_content": "hm", "tool_calls": [asked]},
        *(result, result, {"role": "user", "content": "And?"}),
    )
    with pytest.raises(MessageError, match="results come first"):
        normal_messages([{"role": "user", "content": ["And?", said]}])


def test_the_text_of_a_message_has_several_names():
    for message in ({"role": "ai", "text": "x"}, {"role": "bot", "value": "x"}, {"from": "gpt", "content": "x"}):
        assert normal_message(message) == {"role": "assistant", "content": "x"}
    assert normal_message({"role": "model", "parts": [{"text": "x"}]}) == {"role": "assistant", "content": "x"}


def test_a_tool_has_one_form():
    parameters = WEATHER["function"]["parameters"]
    as_text = {"type": "function", "function": {"name": "weather", "parameters": json.dumps(parameters)}}
    assert normal_tool(as_text) == normal_tool(json.dumps(WEATHER)) == WEATHER
    for key, kind in (("parameters", "function"), ("input_schema", "custom"), ("inputSchema", "function")):
        flat = {"type": kind, "name": "weather", key: parameters}  # as Responses, Anthropic and MCP have it
        assert normal_tool(flat) == WEATHER
    for kind in ("bash_20250124", "custom"):
        with pytest.raises(MessageError, match=f"the tool 'bash' has type '{kind}'; expected function"):
            normal_tool({"type": kind, "name": "bash", "format": {}})
    with pytest.raises(MessageError, match="the tool 'f' has parameters and input_schema; leave one of them"):
        normal_tool({"name": "f", "parameters": {}, "input_schema": {}})
    with pytest.raises(MessageError, match="parameters of the tool 'f' is text, but no JSON"):
        normal_tool({"name": "f", "parameters": "{"})


# ---------------------------------------------------------------------------------------------------------- of Parquet


def asking(name, arguments):
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [{"role": "user", "content": "?"}, {"role": "assistant", "content": "", "tool_calls": [call]}]


def arguments_read(tmp_path, dataset, rows, index=0):
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    reader = SampleReader("train", dataset(path=path), "data.train")
    return reader.conversation(reader.row(index), index)[1]["tool_calls"][0]["function"]["arguments"]


def test_arguments_of_other_tools_are_no_nulls_of_this_call(tmp_path, dataset):
    tools = json.dumps([WEATHER, ADD])
    rows = [
        {"messages": asking("weather", {"city": "Oslo", "day": None, "unit": None, "a": None}), "tools": tools},
        {"messages": asking("add", {"city": None, "day": None, "unit": None, "a": 1}), "tools": tools},
    ]
    # day may be null, so it is; unit may not, so the call does not have it; a belongs to another tool
    assert arguments_read(tmp_path, dataset, rows) == {"city": "Oslo", "day": None}
    assert arguments_read(tmp_path, dataset, rows, 1) == {"a": 1}


def test_nulls_within_arguments_follow_their_schema(tmp_path, dataset):
    place = {"type": "object", "properties": {"city": {"type": "string"}, "note": {"type": "string", "nullable": True}}}
    parameters = {"type": "object", "properties": {"places": {"type": "array", "items": {"$ref": "#/$defs/place"}}}}
    tool = {"name": "go", "parameters": {**parameters, "$defs": {"place": place}}}
    places = [{"city": "Oslo", "note": None, "zip": None}, {"city": None, "note": "x", "zip": 3}]
    rows = [{"messages": asking("go", {"places": places}), "tools": json.dumps([tool])}]
    assert arguments_read(tmp_path, dataset, rows) == {
        "places": [{"city": "Oslo", "note": None}, {"note": "x", "zip": 3}]
    }


@pytest.mark.parametrize(
    ("parameters", "read"),
    [
        (
            {"allOf": [{"$ref": "#/$defs/a"}, {"properties": {"b": {}}}], "$defs": {"a": {"properties": {"a": {}}}}},
            True,
        ),
        ({"properties": {"b": {}}, "allOf": [{"$ref": "#"}, {"properties": {"a": {"$ref": "#/properties/b"}}}]}, True),
        ({"properties": {"a": {"anyOf": [{"$ref": "#/properties/a"}, {"type": "string"}]}, "b": {}}}, False),
        ({"properties": {"a": {"type": 5, "anyOf": 5}, "b": {}}, "required": True, "oneOf": "b"}, False),
    ],
    ids=["in a reference", "in a circle", "its own alternative", "malformed"],
)
def test_nulls_follow_schemas_with_references_in_circles_and_malformed_ones(tmp_path, dataset, parameters, read):
    tool = {"name": "go", "parameters": parameters}
    rows = [{"messages": asking("go", {"a": None, "b": 1}), "tools": json.dumps([tool])}]
    assert arguments_read(tmp_path, dataset, rows) == ({"a": None, "b": 1} if read else {"b": 1})


def test_nulls_of_parquet_without_a_schema_are_an_error_that_names_them(tmp_path, dataset):
    rows = [{"messages": asking("weather", {"city": "Oslo", "a": None})}]
    with pytest.raises(DataError, match=r"row 0: arguments of weather: \.a is null, which Parquet also writes"):
        arguments_read(tmp_path, dataset, rows)
    as_text = [{"messages": asking("weather", '{"city": "Oslo", "a": null}')}]
    assert arguments_read(tmp_path, dataset, as_text) == {"city": "Oslo", "a": None}


def test_a_null_of_json_stays(tmp_path, dataset, write_jsonl):
    rows = [{"messages": asking("weather", {"city": "Oslo", "unit": None, "a": None}), "tools": [WEATHER]}]
    reader = SampleReader("train", dataset(path=write_jsonl(tmp_path / "rows.jsonl", rows)), "data.train")
    call = reader.conversation(reader.row(0), 0)[1]["tool_calls"][0]
    assert call["function"]["arguments"] == {"city": "Oslo", "unit": None}  # a is no parameter of this tool


# ------------------------------------------------------------------------------------------------- stored as JSON text


@pytest.mark.parametrize("column", ["messages", "prompt"])
def test_messages_may_be_stored_as_json_text(tmp_path, dataset, write_jsonl, column):
    text = json.dumps([{"role": "developer", "content": "be brief"}, {"from": "human", "value": "2?"}])
    rows = [{column: text}, {column: json.dumps(text)}]
    reader = PromptReader("train", dataset(path=write_jsonl(tmp_path / "rows.jsonl", rows)), "data.train")
    for index in range(2):
        assert [one["role"] for one in reader.messages(reader.row(index), index)] == ["system", "user"]


def test_text_that_is_json_but_no_messages_is_a_prompt_and_an_error_as_messages(tmp_path, dataset, write_jsonl):
    path = write_jsonl(
        tmp_path / "rows.jsonl", [{"messages": "2?"}, {"messages": "[1, 2]"}, {"messages": '{"role": 1'}]
    )
    reader = PromptReader("train", dataset(path=path), "data.train")
    assert reader.messages(reader.row(0), 0) == ({"role": "user", "content": "2?"},)
    for index in (1, 2):
        with pytest.raises(DataError, match=r"messages should be a list of messages, or the JSON text of one"):
            reader.messages(reader.row(index), index)
    path = write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "[1, 2] =", "completion": "[3]"}])
    samples = SampleReader("train", dataset(path=path), "data.train")
    assert [one["content"] for one in samples.conversation(samples.row(0), 0)] == ["[1, 2] =", "[3]"]
