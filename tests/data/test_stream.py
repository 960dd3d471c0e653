"""Streams: every row once an epoch, the same order for one seed, and a resumed stream goes on with the next row."""

import json
import weakref

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hone.config import Loaded, build, forget_reads, unread, walk
from hone.data.counting import count_items
from hone.data.packing import pack_samples
from hone.data.preference_readers import PairMaker
from hone.data.rendering import Renderer
from hone.data.settings import DataConfig, PromptSetConfig
from hone.data.sources import checksums
from hone.data.sources.base import DataError
from hone.data.sources.checksums import checksum
from hone.data.sources.files import GROUPS_IN_MEMORY
from hone.data.stream import (
    ItemStream,
    PromptMaker,
    PromptStream,
    SampleMaker,
    make_renderer,
    read_all,
    read_prompts,
    row_order,
)

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def renderer(make_tokenizer):
    return make_renderer(build(DataConfig, {"train": {}, "chat_template": CHATML}, "run.yaml"), make_tokenizer())


@pytest.fixture
def numbers(tmp_path, write_jsonl):
    """A file of `count` rows, the prompt of row n being n letters."""

    def write(count, name="numbers"):
        rows = [{"prompt": "x" * n, "ground_truth": n, "level": n % 3} for n in range(count)]
        return write_jsonl(tmp_path / f"{name}.jsonl", rows)

    return write


def row_of(prompt):
    return int(prompt.prompt_id.split("/")[1])


def test_an_epoch_has_every_row_once_in_an_order_of_its_own(numbers, data, renderer):
    stream = PromptStream(data({"path": numbers(11)}), renderer, seed=1)
    epochs = [[row_of(p) for p in stream.take(11)] for _ in range(3)]
    assert [sorted(one) for one in epochs] == [list(range(11))] * 3
    assert len({tuple(one) for one in [*epochs, list(range(11))]}) == 4
    assert stream.rows == 11
    assert stream.epoch == 3


def test_prompts_carry_what_rewards_and_the_ledger_need(gsm8k, data, renderer):
    stream = PromptStream(data(gsm8k, shuffle=False), renderer, seed=1)
    first, second = stream.take(1) + stream.take(1)
    assert (first.prompt_id, first.draw) == ("train/0", 0)
    assert (second.prompt_id, second.draw) == ("train/1", 1)
    assert second.ground_truth == "2"
    assert second.data_source == "train"
    assert second.row["question"] == "What is 1 + 1?"
    assert second.messages == ({"role": "user", "content": "What is 1 + 1?"},)
    text = "<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\n"
    assert renderer.decode(second.token_ids, keep_special=True) == text


def test_the_seed_decides_the_order(numbers, data, renderer):
    path = numbers(30)
    orders = [
        tuple(row_of(p) for p in PromptStream(data({"path": path}), renderer, seed).take(30)) for seed in (1, 1, 2)
    ]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 60), st.integers(1, 20), st.booleans(), st.booleans())
def test_a_resumed_stream_goes_on_with_the_next_row(numbers, data, renderer, before, after, shuffle, mixed):
    mix = {"more": {"path": str(numbers(5, "more")), "weight": 2}} if mixed else {}
    config = data({"path": numbers(9), "max_prompt_tokens": 11}, mix=mix, shuffle=shuffle)
    whole = PromptStream(config, renderer, seed=3)
    whole.take(before)
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = PromptStream(config, renderer, seed=3)
    resumed.take(2)
    resumed.load_state_dict(state)
    assert resumed.take(after) == whole.take(after)
    assert resumed.state_dict() == whole.state_dict()
    assert resumed.dropped == whole.dropped


def test_long_prompts_are_dropped_and_counted_once(numbers, data, renderer):
    path = numbers(10)
    fixed = len(renderer.render_prompt([{"role": "user", "content": ""}]))
    stream = PromptStream(data({"path": path, "max_prompt_tokens": fixed + 6}), renderer, seed=1)
    lengths = [len(renderer.render_prompt([{"role": "user", "content": "x" * n}])) for n in range(10)]
    kept = [n for n in range(10) if lengths[n] <= fixed + 6]
    assert 0 < len(kept) < 10
    prompts = stream.take(3 * len(kept))
    assert sorted(row_of(p) for p in prompts) == sorted(kept * 3)
    assert [p.draw for p in prompts] == list(range(len(prompts)))
    assert stream.dropped == {"train": 10 - len(kept)}
    assert stream.taken == {"train": 3 * len(kept)}


def test_one_row_that_fits_is_found_wherever_it_is(numbers, data, renderer):
    fixed = len(renderer.render_prompt([{"role": "user", "content": ""}]))
    stream = PromptStream(data({"path": numbers(6), "max_prompt_tokens": fixed}), renderer, seed=1)
    assert {p.prompt_id for p in stream.take(40)} == {"train/0"}


def test_if_every_prompt_is_too_long_that_is_an_error(numbers, data, renderer):
    stream = PromptStream(data({"path": numbers(6), "max_prompt_tokens": 2}), renderer, seed=1)
    said = (
        r"data\.train: every one of the 6 rows of .*numbers\.jsonl is longer than max_prompt_tokens=2; the shortest has"
    )
    with pytest.raises(DataError, match=said):
        stream.take(1)
    with pytest.raises(DataError, match=r"data\.evaluation: every one of the 6 rows"):
        read_prompts("test", data({"path": numbers(6), "max_prompt_tokens": 2}).train, renderer, "data.evaluation")


def test_a_mixture_gives_each_set_its_share_in_every_batch(numbers, data, renderer):
    train = {"path": numbers(50), "weight": 3}
    mix = {"a": {"path": str(numbers(7, "a")), "weight": 1}, "b": {"path": str(numbers(9, "b")), "weight": 2}}
    stream = PromptStream(data(train, mix=mix), renderer, seed=1)
    for batch in range(1, 9):
        prompts = stream.take(6)
        assert sorted(p.prompt_id.split("/")[0] for p in prompts) == ["a", "b", "b", "train", "train", "train"]
        assert stream.taken == {"train": 3 * batch, "a": batch, "b": 2 * batch}
    assert stream.rows == 66
    assert stream.epoch == 0
    assert stream.state_dict()["sets"]["b"]["epoch"] == 1


def test_two_sets_of_one_size_are_shuffled_differently(numbers, data, renderer):
    config = data({"path": numbers(20)}, mix={"again": {"path": str(numbers(20))}})
    prompts = PromptStream(config, renderer, seed=1).take(40)
    orders = [[row_of(p) for p in prompts if p.prompt_id.startswith(name)] for name in ("train", "again")]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(20))
    assert orders[0] != orders[1]


def test_skipped_prompts_keep_their_draw_numbers_and_others_take_their_place(numbers, data, renderer):
    stream = PromptStream(data({"path": numbers(10)}, shuffle=False), renderer, 0)
    taken, skipped = stream.take_unless(lambda prompt: row_of(prompt) % 3 == 0, 4)
    assert [(prompt.draw, row_of(prompt)) for prompt in taken] == [(1, 1), (2, 2), (4, 4), (5, 5)]
    assert [prompt.draw for prompt in skipped] == [0, 3]
    assert [prompt.draw for prompt in stream.take(2)] == [6, 7]


def test_prompts_that_are_put_back_come_again_with_the_same_numbers(numbers, data, renderer):
    mix = {"more": {"path": str(numbers(5, "more")), "weight": 2}}
    stream = PromptStream(data({"path": numbers(9), "max_prompt_tokens": 11}, mix=mix), renderer, seed=3)
    stream.take(4)
    before, prompts = stream.state_dict(), stream.take(12)  # 16 prompts: epoch 0 of both sets ends among them
    end = stream.state_dict()
    stream.back_to(before, 7)
    assert stream.take(9) == prompts[3:]
    assert stream.state_dict() == end


def test_prompts_that_are_put_back_do_not_shuffle_their_epoch_again(numbers, data, renderer, monkeypatch):
    shuffled = []

    def watched(reader, seed, epoch):
        shuffled.append(epoch)
        return row_order(reader, seed, epoch)

    monkeypatch.setattr("hone.data.stream.row_order", watched)
    stream, kept = PromptStream(data({"path": numbers(9)}), renderer, seed=3), []
    for _ in range(5):
        before = stream.state_dict()
        prompts = stream.take(4)
        stream.back_to(before, prompts[2].draw)
        kept += prompts[:2]
    assert shuffled == [0] + 2 * [1, 0] + [1]  # the two last steps read into epoch 1, and go back
    assert [prompt.draw for prompt in kept] == list(range(10))


def test_counting_the_rows_that_fit_holds_none(numbers, data, renderer):
    held, most = weakref.WeakSet(), []

    class Item:
        pass

    class Maker(PromptMaker):
        def make(self, index):
            item = Item()
            held.add(item)
            most.append(len(held))
            return item

    assert count_items(Maker, data({"path": numbers(300)}), renderer, lambda one: True) == 300
    assert max(most) <= 2


def test_skipping_everything_ends_after_as_many_prompts_as_there_are_rows(numbers, data, renderer):
    stream = PromptStream(data({"path": numbers(5)}), renderer, 0)
    taken, skipped = stream.take_unless(lambda prompt: True, 2)
    assert [prompt.draw for prompt in skipped] == [0, 1, 2, 3, 4]
    assert [prompt.draw for prompt in taken] == [5, 6]


def test_parquet_is_shuffled_by_windows_of_row_groups(tmp_path, write_parquet, data, renderer):
    rows = [{"prompt": str(n)} for n in range(60)]
    path = write_parquet(tmp_path / "rows.parquet", rows, row_group_size=5)
    stream = PromptStream(data({"path": path, "skip_rows": 3, "max_rows": 51}), renderer, seed=1)
    order = [row_of(p) for p in stream.take(51)]
    assert sorted(order) == list(range(3, 54))
    groups = [n // 5 for n in order]
    loads = sum(group not in groups[max(0, at - 5 * GROUPS_IN_MEMORY) : at] for at, group in enumerate(groups))
    assert loads <= 12  # each of the row groups is read about once, not once for each row
    assert groups != sorted(groups)
    assert set(groups[:17]) != {0, 1, 2, 3}  # the first four row groups hold 17 rows of the range


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state["sets"]["train"].update(rows=8), "now gives 9 rows, but the run that is continued had 8"),
        (lambda state: state.update(seed=5), "had seed 5, this one has 3"),
        (lambda state: state.update(shuffle=False), "had shuffle False, this one has True"),
        (lambda state: state["sets"].update(more={}), r"had sets \['train', 'more'\], this one has \['train'\]"),
    ],
)
def test_a_state_of_other_data_is_refused(numbers, data, renderer, change, said):
    stream = PromptStream(data({"path": numbers(9)}), renderer, seed=3)
    state = stream.state_dict()
    change(state)
    with pytest.raises(DataError, match=said):
        stream.load_state_dict(state)


def test_a_run_that_continues_with_changed_files_says_so(numbers, data, renderer, caplog):
    path = numbers(9)
    stream = PromptStream(data({"path": path}), renderer, seed=3)
    stream.take(2)
    state = json.loads(json.dumps(stream.state_dict()))
    PromptStream(data({"path": path}), renderer, seed=3).load_state_dict(state)
    assert not caplog.records
    text = path.read_text()
    path.write_text(text.replace('"level": 2', '"level": 1'))
    again = PromptStream(data({"path": path}), renderer, seed=3)
    again.load_state_dict(state)
    assert f"data.train: {path} is not what it was when the checkpoint was written" in caplog.text
    caplog.clear()
    again.peek(3)
    earlier = {**state, "sets": {"train": {k: v for k, v in state["sets"]["train"].items() if k != "content"}}}
    again.load_state_dict(earlier)  # of a checkpoint without checksums
    assert not caplog.records


def test_the_checksum_of_a_data_set_is_of_all_its_files(tmp_path, monkeypatch):
    folder = tmp_path / "rows"
    (folder / "more").mkdir(parents=True)
    (folder / "a.jsonl").write_text("{}")
    (folder / "more" / "b.jsonl").write_text("{}")
    places = [str(folder), str(folder / "**" / "*.jsonl")]
    before = [checksum(place) for place in places]
    assert all(before)
    (folder / "more" / "b.jsonl").write_text("[]")
    assert all(one != checksum(place) for one, place in zip(before, places, strict=True))
    assert checksum("openai/gsm8k") == checksum("") == checksum(str(tmp_path / "none*")) == ""
    monkeypatch.setattr(checksums, "MOST_BYTES", 3)
    first = checksum(str(folder))
    (folder / "more" / "b.jsonl").write_text("[!")
    assert checksum(str(folder)) == first  # beyond what is read
    (folder / "more" / "b.jsonl").write_text("[]]")
    assert checksum(str(folder)) != first


TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
FLAT = {"name": "add", "parameters": {"x": {"type": "int"}}}
ADD = {"type": "function", "function": FLAT}


@pytest.mark.parametrize(
    "tools", [[ADD], json.dumps([FLAT]), [{**ADD, "strict": None}], [FLAT]], ids=["list", "text", "null", "flat"]
)
def test_a_column_of_tools_is_rendered_into_prompts_samples_and_pairs(
    tools, tmp_path, write_jsonl, data, make_tokenizer
):
    row = {"prompt": "2 + 2?", "completion": "4", "chosen": "4", "rejected": "5", "tools": tools}
    config = data({"path": write_jsonl(tmp_path / "tools.jsonl", [row])})
    renderer = Renderer(make_tokenizer(TOOLS))
    prompt = PromptStream(config, renderer, seed=1).take(1)[0]
    sample = ItemStream(SampleMaker, config, renderer, seed=1).take(1)[0]
    pair = ItemStream(PairMaker, config, renderer, seed=1).take(1)[0]
    for ids in (prompt.token_ids, sample.token_ids, pair.chosen.token_ids, pair.rejected.token_ids):
        assert renderer.decode(ids).startswith(
            '[{"type": "function", "function": {"name": "add", "parameters": {"x": {"type": "int"}}}}]'
        )
    assert prompt.row["tools"] == tools, "rewards and environments see the column as it is"
    assert prompt.tools == (ADD,)


def test_no_tools_render_as_nothing(tmp_path, write_jsonl, data, make_tokenizer):
    rows = [{"prompt": "2 + 2?", "functions": none} for none in (None, [], "", "[]")]
    config = data({"path": write_jsonl(tmp_path / "none.jsonl", rows), "columns": {"tools": "functions"}})
    prompts = PromptStream(config, Renderer(make_tokenizer(TOOLS)), seed=1).take(4)
    assert len({prompt.token_ids for prompt in prompts}) == 1


def nested(levels):
    parameters = {}
    for _ in range(levels):
        parameters = {"properties": parameters}
    return {"name": "add", "parameters": parameters}


@pytest.mark.parametrize(
    ("tools", "template", "said"),
    [
        ([ADD], TOOLS.replace("tools", "functions"), "has 1 tools in column 'tools', but the chat template does not"),
        ("add", TOOLS, "tools: the column is text, but no JSON"),
        ("[" * 100_000, TOOLS, "tools: the column is text, but no JSON"),
        ([nested(100)], TOOLS, "tools: the tool 'add' is nested deeper than 64 levels"),
        ([nested(450)], TOOLS, "tools: "),
        ('[{"name": "add", "name": "sub"}]', TOOLS, "tools: the column is text, .* the key 'name' is there twice"),
        ({"name": "add"}, TOOLS, r"tools: the column should be a list of JSON schemas, found \{'name'"),
        (["add"], TOOLS, "tools: a tool should be a JSON schema, found 'add'"),
    ],
)
def test_tools_that_cannot_be_rendered_are_an_error(tools, template, said, tmp_path, write_jsonl, data, make_tokenizer):
    config = data({"path": write_jsonl(tmp_path / "bad.jsonl", [{"prompt": "2 + 2?", "tools": tools}])})
    with pytest.raises(DataError, match=said):
        PromptStream(config, Renderer(make_tokenizer(template)), seed=1)


def test_long_samples_are_dropped_truncated_or_an_error(tmp_path, write_jsonl, data, renderer):
    rows = [{"prompt": "q", "completion": "x" * n, "chosen": "x" * n, "rejected": "y" * n} for n in (1, 3, 40)]
    path = write_jsonl(tmp_path / "long.jsonl", rows)
    whole = ItemStream(SampleMaker, data({"path": path}, shuffle=False), renderer, seed=1).take(3)
    begins = whole[0].loss_mask.index(1)
    limit = len(whole[0].token_ids)

    def stream(maker=SampleMaker, tokens=limit, **more):
        return ItemStream(maker, data({"path": path, "max_sample_tokens": tokens, **more}, shuffle=False), renderer, 1)

    dropping = stream()
    assert dropping.take(2) == [whole[0], whole[0]]
    assert dropping.dropped == {"train": 2}
    cut = stream(too_long="truncate").take(3)
    assert [len(one.token_ids) for one in cut] == [limit] * 3
    assert cut[0] == whole[0]
    assert cut[2].token_ids == whole[2].token_ids[:limit]
    assert cut[2].loss_mask == whole[2].loss_mask[:limit]
    with pytest.raises(DataError, match="every one of the 3 rows"):  # nothing would be left to learn
        stream(tokens=begins, too_long="truncate").take(1)
    failing = stream(too_long="error")
    assert failing.take(1) == [whole[0]]
    with pytest.raises(DataError, match=rf"has {len(whole[1].token_ids)} tokens, more than .*_sample_tokens={limit}"):
        failing.take(1)
    pairs = stream(PairMaker, limit, too_long="truncate").take(3)
    assert {len(one.chosen.token_ids) for one in pairs} == {limit}


def test_a_prompt_is_never_truncated(numbers, data, renderer):
    with pytest.raises(DataError, match=r"data\.train\.too_long=truncate .*only supervised samples can be truncated"):
        PromptStream(data({"path": numbers(3), "max_prompt_tokens": 9, "too_long": "truncate"}), renderer, seed=1)
    stopping = PromptStream(data({"path": numbers(9), "max_prompt_tokens": 9, "too_long": "error"}), renderer, seed=1)
    with pytest.raises(DataError, match=r"max_prompt_tokens=9; raise that key, or set data\.train\.too_long=drop"):
        stopping.take(9)


def test_samples_are_packed_for_supervised_steps(gsm8k, data, renderer):
    config = data({**gsm8k, "answer_template": "{{ answer }}"}, shuffle=False)
    stream = ItemStream(SampleMaker, config, renderer, seed=1)
    samples = stream.take(2)
    text = "<|im_start|>user\nWhat is 1 + 1?<|im_end|>\n<|im_start|>assistant\nIt is <<1+1=2>>2.\n#### 2<|im_end|>"
    assert renderer.decode(samples[1].token_ids, keep_special=True) == text
    learnt = [token for token, one in zip(samples[1].token_ids, samples[1].loss_mask, strict=True) if one]
    assert renderer.decode(learnt, keep_special=True) == "It is <<1+1=2>>2.\n#### 2<|im_end|>"
    assert samples[1].source == "train"
    assert pack_samples(samples).num_sequences == 2
    state = stream.state_dict()
    resumed = ItemStream(SampleMaker, config, renderer, seed=1)
    resumed.load_state_dict(state)
    assert resumed.take(9) == stream.take(9)
    assert stream.epoch == 1


def test_long_samples_are_dropped_and_counted(numbers, tmp_path, write_jsonl, data, renderer):
    rows = [{"prompt": "a", "completion": "x" * n} for n in range(1, 30)]
    path = write_jsonl(tmp_path / "samples.jsonl", rows)
    stream = ItemStream(SampleMaker, data({"path": path, "max_sample_tokens": 16}), renderer, seed=1)
    assert max(len(sample.token_ids) for sample in stream.take(40)) == 16
    assert 0 < stream.dropped["train"] < 29
    samples, dropped = read_all(
        SampleMaker("test", data({"path": path, "max_sample_tokens": 16}).train, renderer, "test")
    )
    assert dropped == stream.dropped["train"]
    assert len(samples) == 29 - dropped


def test_held_out_prompts_come_in_the_order_of_the_file(numbers, data, renderer):
    fixed = len(renderer.render_prompt([{"role": "user", "content": "xxxx"}]))
    config = data({"path": numbers(8), "max_prompt_tokens": fixed}).train
    prompts, dropped = read_prompts("test", config, renderer, "evaluation.sets.test")
    assert [p.prompt_id for p in prompts] == [f"test/{n}" for n in range(len(prompts))]
    assert [p.draw for p in prompts] == list(range(len(prompts)))
    assert len(prompts) + dropped == 8


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}],
            "line 1: the last mes",
        ),
        ([{"question": "a"}], r"line 1 has no column 'prompt' or 'messages' \(columns: question\)"),
    ],
)
def test_rows_that_are_no_prompts_name_their_line(tmp_path, write_jsonl, data, renderer, rows, said):
    config = data({"path": write_jsonl(tmp_path / "rows.jsonl", rows)})
    with pytest.raises(DataError, match=said):
        PromptStream(config, renderer, seed=1)


def test_a_prompt_without_tokens_is_a_clear_error(tmp_path, write_jsonl, data, make_tokenizer):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": ""}])
    plain = make_renderer(data({"path": path}), make_tokenizer())
    with pytest.raises(DataError, match=r"rows\.jsonl line 1: the prompt has no tokens"):
        PromptStream(data({"path": path}), plain, seed=1)


def test_rows_that_fail_later_name_their_line_too(tmp_path, write_jsonl, data, renderer):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "a"}, {"prompt": "b"}, {"prompt": None}])
    stream = PromptStream(data({"path": path}, shuffle=False), renderer, seed=1)
    with pytest.raises(DataError, match=r"rows\.jsonl line 3 has no column 'prompt'"):
        stream.take(3)


def test_a_missing_file_or_column_is_found_before_training(numbers, data, renderer):
    with pytest.raises(DataError, match=r"warm_start\.data\.train: no file .*nubmers\.jsonl; did you mean"):
        ItemStream(
            SampleMaker, data({"path": str(numbers(3)).replace("numbers", "nubmers")}), renderer, 0, "warm_start.data"
        )
    with pytest.raises(
        DataError, match=r"data\.mix\.more\.columns\.prompt: unknown column .* 'promt'; did you mean 'prompt'"
    ):
        PromptStream(
            data({"path": numbers(3)}, mix={"more": {"path": str(numbers(3)), "columns": {"prompt": "promt"}}}),
            renderer,
            0,
        )


def test_settings_that_a_stream_does_not_use_count_as_unread(numbers, data, renderer):
    given = {"path": str(numbers(3)), "answer_template": "{{ a }}", "weight": 2.0, "system_prompt": "s", "max_rows": 2}
    config = data(given)
    forget_reads(config)
    PromptStream(config, renderer, seed=0)
    provenance = {key: "run.yaml" if key.removeprefix("train.") in given else "default" for key, _ in walk(config)}
    assert unread(Loaded(config, provenance)) == ["train.answer_template", "train.weight"]


def test_the_name_train_is_taken(data):
    with pytest.raises(ValueError, match="may not be called 'train'"):
        data({}, mix={"train": {"path": "a.jsonl"}})


def test_rows_that_a_template_has_rendered_are_noticed(tmp_path, make_tokenizer, caplog):
    texts = {
        "llama": "<|start_header_id|>user<|end_header_id|>\n\n2?<|eot_id|>",
        "own": "<|im_start|>user\n2?<|im_end|>",
        "plain": "is [INST] a word?",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": text}]}))
    for name, allowed in (("llama", False), ("own", False), ("own", True), ("plain", False)):
        caplog.clear()
        chat = {"special_tokens_in_rows": allowed}
        config = build(DataConfig, {"train": {"path": str(tmp_path / f"{name}.jsonl")}, "chat": chat}, "run.yaml")
        PromptStream(config, make_renderer(config, make_tokenizer()), seed=0)
        assert ("as if a chat template had rendered it" in caplog.text) == (name != "plain" and not allowed), name


def test_rendered_rows_of_an_evaluation_set_are_noticed(tmp_path, make_tokenizer, caplog, write_jsonl):
    text = "<|im_start|>user\n2?<|im_end|>"
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": text, "completion": "4"}])
    for allowed in (True, False):
        caplog.clear()
        renderer = Renderer(make_tokenizer(), special_tokens_in_rows=allowed)
        read_prompts("all", build(PromptSetConfig, {"path": str(path)}, "run.yaml"), renderer, "evaluation.sets.one")
        told = "evaluation.sets.one holds <|im_end|> and <|im_start|>" in caplog.text
        assert told == (not allowed), caplog.text
