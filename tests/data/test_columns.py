"""Columns and templates: raw files work as they are, and a wrong column names the columns there are."""

import pytest

from hone.data.columns import PromptReader, SampleReader, Template
from hone.data.sources.base import DataError

CHAT = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "4"}]


@pytest.fixture
def reader(tmp_path, write_jsonl, dataset):
    def read(rows, cls=PromptReader, **settings):
        return cls("train", dataset(path=write_jsonl(tmp_path / "rows.jsonl", rows), **settings), "data.train")

    return read


def test_the_raw_gsm8k_file_works_as_it_is(gsm8k, dataset):
    prompts = PromptReader("train", dataset(**gsm8k), "data.train")
    row = prompts.row(3)
    assert prompts.messages(row, 3) == ({"role": "user", "content": "What is 3 + 3?"},)
    assert prompts.ground_truth(row, 3) == "6"
    assert prompts.data_source(row) == "train"
    assert dict(prompts.rest(row)) == row
    samples = SampleReader("train", dataset(**gsm8k, answer_template="{{ answer }}"), "data.train")
    assert samples.conversation(row, 3)[1]["content"] == "It is <<3+3=6>>6.\n#### 6"


def test_a_template_may_use_anything_in_a_row():
    template = Template(
        "prompt_template",
        "{{ metadata.direction[:3] }} {{ metadata.original_numbers | map('float') | map('int') | join(' ') }}\n",
    )
    row = {"metadata": {"direction": "descending", "original_numbers": ["4.0", "-7.5"]}}
    assert template.render(row, str, 0) == "des 4 -7\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{{ questoin }}", r"fails on row 5: 'questoin' is undefined \(columns: question\)"),
        ("{{ question.nothing }}", "has no attribute 'nothing'"),
        ("{{ 1 // 0 }}", "division"),
        ("{{ question.__class__.__mro__ }}", "access to attribute '__class__'"),
        ("{{ question | int(default='x') + 1 }}", "fails on row 5"),
    ],
)
def test_a_failing_template_names_the_row_and_its_columns(text, said):
    with pytest.raises(DataError, match=said):
        Template("prompt_template", text).render({"question": "q"}, "row {}".format, 5)


def test_a_template_that_is_not_one_is_a_clear_error():
    with pytest.raises(DataError, match=r"data\.train\.prompt_template is not a valid Jinja2 template: .*line 2"):
        Template("data.train.prompt_template", "a\n{{ question ")


def test_standard_columns_are_taken_as_they_are(reader):
    row = {"prompt": "2?", "ground_truth": [4, {"a": 1}], "data_source": "sums", "level": 3}
    one = reader([row])
    assert one.messages(row, 0) == ({"role": "user", "content": "2?"},)
    assert one.ground_truth(row, 0) == [4, {"a": 1}]
    assert one.data_source(row) == "sums"
    assert one.rest(row) == {"level": 3}


def test_messages_and_prompts_that_are_messages(reader):
    for column in ("messages", "prompt"):
        one = reader([{column: CHAT[:1]}])
        assert one.messages(one.row(0), 0) == tuple(CHAT[:1])
        assert one.ground_truth(one.row(0), 0) is None


def test_columns_have_other_names(reader):
    row = {"problem": "2?", "solution": 4, "prompt": "not this"}
    one = reader([row], columns={"prompt": "problem", "ground_truth": "solution"})
    assert one.messages(row, 0)[0]["content"] == "2?"
    assert one.ground_truth(row, 0) == 4
    with pytest.raises(DataError, match=r"line 1 has no column 'solution' \(columns: problem\)"):
        one.ground_truth({"problem": "2?"}, 0)


def test_naming_a_column_settles_which_of_two_is_meant(reader):
    row = {"prompt": "2?", "messages": CHAT}
    one = reader([row], columns={"prompt": "prompt"})
    assert one.messages(row, 0) == ({"role": "user", "content": "2?"},)
    one = reader([row], columns={"messages": "messages"})
    assert one.messages(row, 0) == tuple(CHAT)
    one = reader([row], prompt_template="{{ prompt }}!")
    assert one.messages(row, 0)[0]["content"] == "2?!"


def test_a_system_prompt_comes_first_unless_there_is_one(reader):
    one = reader([{"prompt": "2?"}], system_prompt="be brief")
    assert [m["role"] for m in one.messages({"prompt": "2?"}, 0)] == ["system", "user"]
    own = {"messages": [{"role": "system", "content": "own"}, *CHAT[:1]]}
    assert one.messages(own, 0)[0]["content"] == "own"
    for row, said in (({"prompt": "2?", "system": "of the row"}, "of the row"), ({**own, "system": "column"}, "own")):
        assert one.messages(row, 0)[0]["content"] == said


def test_parquet_messages_lose_the_nulls_that_fill_gaps(tmp_path, dataset, write_parquet):
    messages = [{"role": "user", "content": "2?"}, {"role": "tool", "content": "4", "tool_call_id": "a"}]
    path = write_parquet(tmp_path / "rows.parquet", [{"messages": messages}])
    one = PromptReader("train", dataset(path=path), "data.train")
    assert one.row(0)["messages"][0]["tool_call_id"] is None
    assert one.messages(one.row(0), 0) == tuple(messages)


def read_first(reader, row, settings):
    one = reader([row], **settings)
    return one.messages(one.row(0), 0)


@pytest.mark.parametrize(
    ("row", "settings", "said"),
    [
        (
            {"question": "2?", "answer": "4"},
            {},
            r"line 1 has no column 'prompt' or 'messages' \(columns: question, answer\)",
        ),
        ({"prompt": "2?", "messages": CHAT}, {}, r"has both 'prompt' and 'messages': name one in data\.train\.columns"),
        (
            {"question": "2?"},
            {"columns": {"prompt": "questoin"}},
            r"columns\.prompt: .*'questoin'; did you mean 'question'",
        ),
        ({"prompt": 7}, {}, "line 1: prompt should be text or a list of messages, found 7"),
        ({"prompt": []}, {}, "should be text or a list of messages"),
        ({"messages": ["2?"]}, {}, "a message should have a role and a content, found '2\\?'"),
        ({"messages": [{"role": "user"}]}, {}, "a message of role 'user' has no content"),
        ({"prompt": "2?"}, {"skip_rows": 1}, r"data\.train\.skip_rows=1 skips all 1 rows of .*; lower it"),
    ],
)
def test_a_wrong_row_or_column_is_a_clear_error(reader, row, settings, said):
    with pytest.raises(DataError, match=said):
        read_first(reader, row, settings)


def test_bytes_of_parquet_are_no_list_of_messages(reader):
    with pytest.raises(DataError, match=r"prompt should be text or a list of messages, found b'2\?'"):
        reader([{"prompt": "2?"}]).messages({"prompt": b"2?"}, 0)


def test_samples_come_from_conversations_or_from_prompt_and_completion(reader):
    for row in ({"messages": CHAT}, {"prompt": "2?", "completion": "4"}, {"prompt": CHAT[:1], "completion": CHAT[1:]}):
        one = reader([row], SampleReader)
        assert one.conversation(one.row(0), 0) == tuple(CHAT)
    one = reader([{"prompt": "2?", "response": "4"}], SampleReader, columns={"completion": "response"})
    assert one.conversation(one.row(0), 0) == tuple(CHAT)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"prompt": "2?", "answer": "4"},
            r"has no column 'completion' \(columns: prompt, answer\); set data\.train\.answer_t",
        ),
        ({"prompt": "2?", "completion": 4}, "should be text or a list of messages, found 4"),
    ],
)
def test_a_sample_without_an_answer_is_a_clear_error(reader, row, said):
    one = reader([row], SampleReader)
    with pytest.raises(DataError, match=said):
        one.conversation(one.row(0), 0)


def test_skip_and_max_rows(reader):
    one = reader([{"prompt": str(n)} for n in range(10)], skip_rows=4, max_rows=3)
    assert (one.first, one.last, len(one)) == (4, 7, 3)
    assert len(reader([{"prompt": "a"}] * 3, max_rows=9)) == 3


def test_a_dotted_name_is_a_column_within_a_column(reader):
    row = {"prompt": [{"role": "user", "content": "2+2"}], "reward_model": {"style": "rule", "ground_truth": "4"}}
    prompts = reader([row], columns={"ground_truth": "reward_model.ground_truth"})
    found = prompts.row(0)
    assert prompts.ground_truth(found, 0) == "4"
    assert prompts.rest(found) == {"reward_model": row["reward_model"]}
    with pytest.raises(DataError, match=r"unknown column of .* 'reward_model.truth'"):
        reader([row], columns={"ground_truth": "reward_model.truth"})
