"""Scoring with the built-in engine against the plain transformers forward."""

import pytest
import torch

from hone.rollout.builtin.engine import BuiltinEngine
from hone.rollout.builtin.scoring import in_turns
from hone.rollout.settings import BuiltinSettings

SEQUENCES = [tuple(range(10, 10 + n)) for n in (1, 2, 25, 7, 18)]


@pytest.mark.parametrize(
    ("kind", "path"),
    [("qwen3", "fused"), ("qwen3", "generic"), ("llama", "fused"), ("gemma2", "auto"), ("mistral_window", "auto")],
)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_scores_are_the_log_probs_of_the_plain_forward(kind, path, temperature, tiny, forward):
    """In several forwards: the second one holds a sequence that is longer than `prefill_tokens`."""
    model = tiny(kind)
    engine = BuiltinEngine(BuiltinSettings(execution=path, prefill_tokens=16), model)
    for sequence, scores in zip(SEQUENCES, engine.score(SEQUENCES, temperature), strict=True):
        logits = forward(model, sequence)[:-1] / temperature
        expected = logits.log_softmax(-1).gather(1, torch.tensor(sequence[1:], dtype=torch.int64)[:, None])[:, 0]
        assert scores[0] == 0
        torch.testing.assert_close(scores[1:], expected, atol=1e-5, rtol=1e-5)


def test_what_cannot_be_scored_is_refused(tiny):
    engine = BuiltinEngine(BuiltinSettings(max_sequence_tokens=8, kv_cache_tokens=64), tiny("qwen3"))
    assert len(engine.score([tuple(range(8))], 1.0)[0]) == 8
    for wrong, message in (((), "empty"), (tuple(range(9)), "at most"), ((10**6,), "vocabulary")):
        with pytest.raises(ValueError, match=message):
            engine.score([(1, 2), wrong], 1.0)
    empty = BuiltinEngine(BuiltinSettings(), tiny.config("qwen3"))
    with pytest.raises(RuntimeError, match="no weights"):
        empty.score([(1, 2)], 1.0)


def test_turns_hold_as_many_tokens_as_may_be():
    assert list(in_turns([(1,) * n for n in (3, 4, 9, 1, 8, 2)], 8)) == [[0, 1], [2], [3], [4], [5]]
    assert list(in_turns([], 8)) == []
