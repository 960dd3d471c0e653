"""The search tool: a hand-computed BM25 ranking, passages, calls, and a corpus that cannot be used."""

import asyncio
import json
import math
import tracemalloc

import pyarrow
import pyarrow.parquet
import pytest

from hone.cli.main import main
from hone.config import ConfigError, build
from hone.envs.search import NOTHING, Index, SearchEnv
from hone.envs.settings import EpisodeConfig
from hone.envs.tool_calls import Call, Said
from hone.types import Completion, Prompt, StopReason

DONE = Completion("x", (), (), (), StopReason.STOP)
PROMPT = Prompt("set/0", (1,), ({"role": "user", "content": "Where is the Louvre?"},), "Paris", "set")
PASSAGES = [
    {"title": "Louvre", "text": "A museum in Paris."},
    {"title": "Prado", "text": "A museum in Madrid."},
    {"title": "Seine", "text": "A river in Paris, France, and a museum is near the river."},
]


def corpus_of(folder, rows=PASSAGES, name="corpus.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return {"path": str(path)}


def envs_of(corpus, **env):
    config = build(EpisodeConfig, {"env": {"name": "search", "corpus": corpus, **env}}, "recipe.yaml")
    shared = SearchEnv.for_run(config)
    return lambda: shared(PROMPT, 0, config)


def results(env, *arguments):
    """What the policy reads of searches with these arguments, and what was wrong with each."""

    async def play():
        await env.start()
        step = await env.step(Said("", calls=tuple(Call("search", one, "") for one in arguments)), DONE)
        await env.close()
        return step

    step = asyncio.run(play())
    return [message["content"] for message in step.messages], [note.fault for note in step.calls]


def bm25(occurrences, texts_with, length, *, texts=4, mean=2.5):
    """The formula of Lucene for one word: its weight by rarity, times its saturated frequency."""
    rarity = math.log(1 + (texts - texts_with + 0.5) / (texts_with + 0.5))
    return rarity * occurrences / (occurrences + 1.5 * (1 - 0.75 + 0.75 * length / mean))


def test_the_ranking_is_that_of_bm25():
    texts = ["red fox", "red red fox", "blue fox sleeps", "green frog"]  # 2, 3, 3 and 2 words: 2.5 on average
    index = Index(texts)
    scores = [bm25(1, 2, 2) + bm25(1, 3, 2), bm25(2, 2, 3) + bm25(1, 3, 3), bm25(1, 3, 3), 0.0]
    assert index._bm25.get_scores(["red", "fox"]).tolist() == pytest.approx(scores, rel=1e-5)
    assert scores[1] > scores[0] > scores[2]
    assert index.best("red fox", 3) == [1, 0, 2]
    assert index.best("RED, fox!", 4) == [1, 0, 2]  # the frog has no word of the query
    assert index.best("fox", 1) == [0]  # shortest
    assert index.best("zebra ?", 3) == index.best("", 3) == []


def test_equal_scores_keep_the_order_of_the_texts():
    texts = [f"word{number % 7} common" for number in range(200)]
    assert Index(texts).best("common", 200) == list(range(200))
    assert Index(texts).best("word3", 5) == [3, 10, 17, 24, 31]
    better = list(range(3, 200, 7))
    assert Index(texts).best("common word3", 200) == better + [one for one in range(200) if one not in better]


def test_a_query_finds_titles_and_texts_of_a_file(tmp_path):
    make = envs_of(corpus_of(tmp_path), max_passages=2)
    texts, faults = results(make(), {"query": "museum paris"}, {"query": "prado", "k": 1}, {"query": "Rome"})
    assert texts == [
        "Louvre: A museum in Paris.\n\nSeine: A river in Paris, France, and a museum is near the river.",
        "Prado: A museum in Madrid.",
        NOTHING,
    ]
    assert faults == ["", "", ""]
    table = pyarrow.Table.from_pylist(PASSAGES)
    pyarrow.parquet.write_table(table, tmp_path / "corpus.parquet")
    again = envs_of({"path": str(tmp_path / "corpus.parquet")}, max_passages=2)
    assert results(again(), {"query": "museum paris"})[0] == texts[:1]


def test_without_titles_only_the_text_is_searched_and_read(tmp_path):
    corpus = {**corpus_of(tmp_path), "title_column": None}
    texts, _ = results(envs_of(corpus)(), {"query": "prado"}, {"query": "madrid"})
    assert texts == [NOTHING, "A museum in Madrid."]
    other = {**corpus_of(tmp_path), "title_column": "text", "text_column": "title"}
    assert results(envs_of(other)(), {"query": "madrid"})[0] == ["A museum in Madrid.: Prado"]


def test_a_long_passage_is_cut_but_searched_whole(tmp_path):
    rows = [{"title": "Pi", "text": "3" * 5000 + " end"}]
    (text,), _ = results(envs_of(corpus_of(tmp_path, rows), max_passage_characters=10)(), {"query": "end"})
    assert text == "Pi: 333333 [...]"


def test_a_call_that_does_not_fit_is_the_policys_to_read(tmp_path):
    make = envs_of(corpus_of(tmp_path), max_passages=2)
    texts, faults = results(make(), {"query": "a", "k": 3}, {"k": 1}, {"query": ["a"]}, {"query": "a", "limit": 1})
    assert faults == ["arguments"] * 4
    assert texts[0] == "error: k: Input should be less than or equal to 2"
    spec = asyncio.run(make().start()).tools[0]["function"]
    assert spec["parameters"]["properties"]["k"] == {
        "type": "integer", "minimum": 1, "maximum": 2, "default": 2, "description": "number of passages"
    }  # fmt: skip
    assert spec["parameters"]["required"] == ["query"]


@pytest.mark.parametrize(
    ("rows", "keys", "error"),
    [
        (PASSAGES, {"path": "corpus.json1"}, r"corpus.path: no file or folder .*did you mean .*corpus\.jsonl\?"),
        ([], {}, r"corpus: .*corpus\.jsonl has no rows"),
        ([{"text": "?"}, {"text": "!"}], {"title_column": None}, "corpus: .* has no words in column text"),
        (PASSAGES, {"text_column": "body"}, r"corpus.text_column: .* line 1 has no column 'body' \(it has: title, tex"),
        ([*PASSAGES, {"text": "a"}], {}, r"corpus.title_column: .* line 4 has no column 'title'.*null: passages witho"),
        ([{"title": "a", "text": 7}], {}, r"corpus.text_column: 'text' of .* line 1 should be text, found 7"),
    ],
)
def test_a_corpus_that_cannot_be_used_is_an_error_before_the_run(tmp_path, rows, keys, error):
    corpus = {**corpus_of(tmp_path, rows), **keys}
    corpus["path"] = str(tmp_path / corpus["path"])
    with pytest.raises(ConfigError, match=f"episode.env.{error}"):
        envs_of(corpus)


def test_it_passes_the_check_of_environments(tmp_path, capsys):
    path = corpus_of(tmp_path)["path"]
    assert main(["env", "check", "search", f"episode.env.corpus.path={path}"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "no problem found"


def test_words_take_little_memory_while_they_are_indexed():
    texts = [" ".join(f"word{(n * 31 + i) % 997}" for i in range(100)) for n in range(2000)]
    tracemalloc.start()
    try:
        Index(texts)
        assert tracemalloc.get_traced_memory()[1] / len(texts) < 6000  # bytes a text; as words they are 11,000
    finally:
        tracemalloc.stop()
