"""Pairs, judged answers and answers in steps: from rows to tokens and masks, and into one batch."""

from functools import partial

import pytest

from hone.data.packing import Sample
from hone.data.preference_readers import JudgedMaker, PairMaker, StepsMaker
from hone.data.preferences import Judged, Pair, mismatched, pack_judged, pack_pairs
from hone.data.rendering import Renderer
from hone.data.sources.base import DataError
from hone.data.stream import ItemStream, TooLong
from hone.models.settings import BuildConfig
from hone.models.tokenizer import build_tokenizer


@pytest.fixture
def renderer():
    return Renderer(build_tokenizer(BuildConfig(characters=" abcdefghijklmnopqrstuvwxyz\n")))


IN_LINES = partial(StepsMaker, separator="\n")


@pytest.fixture
def make(tmp_path, write_jsonl, dataset, renderer):
    """make(maker, row, settings...) -> the item of that row."""

    def made(maker, row, **settings):
        path = write_jsonl(tmp_path / "rows.jsonl", [row])
        return maker("train", dataset(path=path, **settings), renderer, "data.train").make(0)

    return made


def learnt(renderer, sample):
    ids = [token for token, bit in zip(sample.token_ids, sample.loss_mask, strict=True) if bit]
    return renderer.decode(ids, keep_special=True)


def whole(renderer, sample):
    return renderer.decode(sample.token_ids, keep_special=True)


# ----------------------------------------------------------------------------------------------------------- pairs


def test_a_pair_of_texts(make, renderer):
    pair = make(PairMaker, {"prompt": "hi", "chosen": "good", "rejected": "bad"})
    assert whole(renderer, pair.chosen) == "<bos><user>hi<assistant>good<eos>"
    assert whole(renderer, pair.rejected) == "<bos><user>hi<assistant>bad<eos>"
    assert (learnt(renderer, pair.chosen), learnt(renderer, pair.rejected)) == ("good<eos>", "bad<eos>")
    assert (pair.margin, pair.row, pair.tokens) == (0.0, "train/0", 10 + 9)


def test_columns_and_margin_may_have_other_names(make, renderer):
    row = {"q": "hi", "good": "yes", "bad": "no", "gap": 2}
    columns = {"prompt": "q", "chosen": "good", "rejected": "bad", "margin": "gap"}
    pair = make(PairMaker, row, columns=columns)
    assert (learnt(renderer, pair.chosen), learnt(renderer, pair.rejected), pair.margin) == ("yes<eos>", "no<eos>", 2.0)


def test_answers_may_be_messages_or_whole_conversations(make, renderer):
    def says(role, text):
        return {"role": role, "content": text}

    answers = make(
        PairMaker,
        {"prompt": "hi", "chosen": [says("assistant", "good")], "rejected": [says("assistant", "bad")]},
    )
    assert whole(renderer, answers.chosen) == "<bos><user>hi<assistant>good<eos>"
    begins = [says("user", "hi"), says("assistant", "what"), says("user", "that")]
    conversations = make(
        PairMaker,
        {"chosen": [*begins, says("assistant", "good")], "rejected": [*begins, says("assistant", "bad")]},
        system_prompt="be nice",
    )
    text = "<bos><system>be nice<user>hi<assistant>what<eos><user>that<assistant>"
    assert whole(renderer, conversations.chosen) == text + "good<eos>"
    assert learnt(renderer, conversations.chosen) == "good<eos>"  # the answer that both have is part of the prompt
    assert learnt(renderer, conversations.rejected) == "bad<eos>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "hi", "chosen": "a", "rejectd": "b"}, r"line 1: unknown column 'rejected'; did you mean 'rejectd'"),
        ({"prompt": "hi", "chosen": "a", "rejected": None}, r"'rejected' is null.*data\.train\.columns\.rejected"),
        ({"prompt": "hi", "chosen": "a", "rejected": "a"}, "line 1: chosen and rejected are equal"),
        ({"prompt": "hi", "chosen": "1", "rejected": "2"}, "the same tokens once they are rendered"),  # both <unk>
        ({"prompt": "hi", "chosen": " ", "rejected": "a"}, "line 1: chosen is empty"),
        ({"prompt": "hi", "chosen": "a", "rejected": ""}, "line 1: rejected is empty"),
        ({"prompt": "hi", "chosen": "a", "rejected": "b", "margin": "x"}, "margin should be a number, found 'x'"),
        ({"chosen": "a", "rejected": "b"}, "no column 'prompt' or 'messages'"),
        (
            {"prompt": "hi", "chosen": [{"role": "user", "content": "hi"}], "rejected": "b"},
            "chosen should end with an answer",
        ),
    ],
)  # fmt: skip
def test_a_row_that_is_no_pair_is_named(make, row, message):
    with pytest.raises(DataError, match=message):
        make(PairMaker, row)


def test_a_pair_is_dropped_if_one_of_the_two_is_too_long(make):
    row = {"prompt": "hi", "chosen": "a", "rejected": "abcdefgh"}
    assert make(PairMaker, row, max_sample_tokens=14).tokens == 7 + 14
    with pytest.raises(TooLong, match="14"):
        make(PairMaker, row, max_sample_tokens=13)


def test_pairs_come_from_a_resumable_stream(tmp_path, write_jsonl, data, renderer):
    rows = [{"prompt": "abc"[i % 3], "chosen": "x" * (i + 1), "rejected": "y"} for i in range(7)]
    config = data({"path": write_jsonl(tmp_path / "rows.jsonl", rows)})
    stream, again = (ItemStream(PairMaker, config, renderer, seed=3) for _ in range(2))
    stream.take(9)
    again.load_state_dict(stream.state_dict())
    assert stream.take(5) == again.take(5)


def test_packed_pairs():
    first = Pair(Sample((5, 6, 7), (0, 1, 1)), Sample((5, 8), (0, 1)), margin=0.5)
    second = Pair(Sample((4, 6), (0, 1)), Sample((4, 8), (0, 1)))
    batch = pack_pairs([first, second])
    assert batch.token_ids.tolist() == [5, 6, 7, 5, 8, 4, 6, 4, 8]
    assert batch.group_index.tolist() == [0, 0, 1, 1]
    assert batch.rewards.tolist() == [1, 0, 1, 0]
    assert batch.components["margin"].tolist() == [0.5, 0.5, 0, 0]
    assert pack_pairs([second]).components == {}


# --------------------------------------------------------------------------------------------------- judged answers


@pytest.mark.parametrize(("label", "good"), [(True, True), (False, False), (1, True), (0.0, False)])
def test_a_judged_answer(make, renderer, label, good):
    one = make(JudgedMaker, {"prompt": "hi", "completion": "yes", "label": label})
    assert (learnt(renderer, one.sample), one.good, one.row) == ("yes<eos>", good, "train/0")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "hi", "completion": "yes", "label": "good"}, "label should be true or false .* found 'good'"),
        ({"prompt": "hi", "completion": "yes", "label": 2}, "found 2"),
        ({"prompt": "hi", "completion": "yes", "lable": 1}, "unknown column 'label'; did you mean 'lable'"),
        ({"prompt": "hi", "completion": "", "label": 1}, "the answer is empty"),
    ],
)
def test_an_answer_that_nobody_judged_is_named(make, row, message):
    with pytest.raises(DataError, match=message):
        make(JudgedMaker, row)


def test_mismatched_answers_go_round():
    judged = [
        Judged(Sample((1, 2, 9), (0, 0, 1)), True),
        Judged(Sample((3, 8, 7), (0, 1, 1)), False),
        Judged(Sample((4, 6), (0, 1)), True),
    ]
    crossed = mismatched(judged, 4)
    assert [one.sample.token_ids for one in crossed] == [(1, 2, 8, 7), (3, 6), (4, 9)]
    assert [one.sample.loss_mask for one in crossed] == [(0, 0, 1, 1), (0, 1), (0, 1)]
    assert pack_judged(judged).rewards.tolist() == [1, 0, 1]


def test_an_answer_that_does_not_fit_under_a_prompt_is_not_put_there():
    long, short = (1, 1, 1, 1, 5), (2, 6, 6, 6, 6)  # a long prompt with a short answer, and the other way round
    judged = [
        Judged(Sample(long, (0, 0, 0, 0, 1)), True),
        Judged(Sample(short, (0, 1, 1, 1, 1)), True),
        Judged(Sample((3, 7), (0, 1)), True),
    ]
    found = [[one.sample.token_ids for one in mismatched(rows, 5)] for rows in (judged, judged[:2])]
    assert found[0] == [(1, 1, 1, 1, 7), (2, 7), (3, 5)]  # the first prompt takes the answer after the next
    assert found[1] == [(2, 5)]  # there is none for it here
    assert [len(one.sample.token_ids) for one in mismatched(judged, 8)] == [8, 2, 2]


# ---------------------------------------------------------------------------------------------------------- in steps


def test_the_mark_of_a_step_is_on_the_token_after_it(make, renderer):
    one = make(IN_LINES, {"prompt": "hi", "completions": ["ab", "c"], "labels": [True, False]})
    assert whole(renderer, one.sample) == "<bos><user>hi<assistant>ab\nc<eos>"
    assert learnt(renderer, one.sample) == "\n<eos>"
    assert one.labels == (1.0, 0.0)
    bare = make(partial(StepsMaker, separator=""), {"prompt": "hi", "completions": ["ab", "c"], "labels": [1, 1]})
    assert (whole(renderer, bare.sample), learnt(renderer, bare.sample)) == (
        "<bos><user>hi<assistant>abc<eos>",
        "c<eos>",
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": [True]}, "2 completions but 1 labels"),
        ({"labels": [True, 3]}, "labels should be true or false .* found 3"),
        ({"completions": "ab"}, "completions should be a list, found 'ab'"),
        ({"completions": ["ab", " "]}, r"completions\[1\] is empty"),
        ({"completions": ["ab", 3]}, r"completions\[1\] should be text"),
        ({"labels": []}, "labels should be a list"),
    ],
)
def test_steps_that_do_not_fit_their_labels_are_named(make, changes, message):
    with pytest.raises(DataError, match=message):
        make(IN_LINES, {"prompt": "hi", "completions": ["ab", "c"], "labels": [True, False], **changes})
