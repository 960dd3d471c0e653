"""Scoring with the built-in engine against the plain transformers forward."""

import pytest
import torch
from transformers import OPTConfig

from hone.rollout.adapters import AdapterFiles
from hone.rollout.builtin.cache import PackedPrompts
from hone.rollout.builtin.engine import BuiltinEngine
from hone.rollout.builtin.generic import GenericDecoder
from hone.rollout.builtin.scoring import in_turns
from hone.rollout.settings import BuiltinSettings
from hone.types import GenerationRequest, SamplingParams
from tests.conftest import OLD
from tests.rollout.peft_adapters import adapt

CPU = torch.device("cpu")
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
    for sequence, found in zip(SEQUENCES, engine.score_all(SEQUENCES, temperature), strict=True):
        scores = found.logprobs
        logits = forward(model, sequence)[:-1] / temperature
        expected = logits.log_softmax(-1).gather(1, torch.tensor(sequence[1:], dtype=torch.int64)[:, None])[:, 0]
        assert scores[0] == 0
        torch.testing.assert_close(scores[1:], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "mistral_window"])
def test_logits_of_a_long_prompt_are_computed_a_few_tokens_at_a_time(kind, tiny, forward, monkeypatch):
    """By the model's own head: Gemma 2's caps its logits."""
    monkeypatch.setattr("hone.rollout.builtin.scoring._ROWS", 8)
    model = tiny(kind)
    engine = BuiltinEngine(BuiltinSettings(execution="generic"), model)
    rows = []
    head = engine._decoder._model.get_output_embeddings()
    head.register_forward_hook(lambda module, inputs, output: rows.append(output.shape[1]))
    (found,) = engine.score_all([SEQUENCES[2]], 1.0, top_k=3)
    assert max(rows) == 8
    expected = forward(model, SEQUENCES[2])[:-1].log_softmax(-1)
    own = expected.gather(1, torch.tensor(SEQUENCES[2][1:])[:, None])[:, 0]
    torch.testing.assert_close(found.logprobs[1:], own, atol=1e-5, rtol=1e-5)
    assert found.top_ids[1:].tolist() == expected.topk(3)[1].tolist()


@pytest.mark.skipif(OLD, reason="transformers before 5.19 passes a mask to the attention of OPT")
def test_a_model_whose_head_cannot_be_run_apart_scores_up_to_a_limit(monkeypatch):
    sizes = {"hidden_size": 32, "ffn_dim": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "pad_token_id": 0}
    decoder = GenericDecoder(OPTConfig(vocab_size=104, word_embed_proj_dim=32, **sizes), torch.float32, CPU)
    prompts = PackedPrompts.of([SEQUENCES[2]], [0], CPU)
    assert decoder.score(prompts, 1.0).logprobs.shape == (25,)
    monkeypatch.setattr("hone.rollout.builtin.generic.MOST_LOGITS", 2599)
    with pytest.raises(ValueError, match=r"score 25 tokens with OPTForCausalLM.*all 2600 logits .* at most 2599"):
        decoder.score(prompts, 1.0)


def test_what_cannot_be_scored_is_refused(tiny):
    engine = BuiltinEngine(BuiltinSettings(max_sequence_tokens=8, kv_cache_tokens=64), tiny("qwen3"))
    assert len(engine.score_all([tuple(range(8))], 1.0)[0].logprobs) == 8
    for wrong, message in (((), "empty"), (tuple(range(9)), "at most"), ((10**6,), "vocabulary")):
        with pytest.raises(ValueError, match=message):
            engine.score_all([(1, 2), wrong], 1.0)
    empty = BuiltinEngine(BuiltinSettings(), tiny.config("qwen3"))
    with pytest.raises(RuntimeError, match="no weights"):
        empty.score_all([(1, 2)], 1.0)


def test_scores_are_the_policys_whichever_adapter_answered_last(tiny, tokenizer, tmp_path, finish, forward):
    judge, _, _ = adapt(tiny("qwen3"), 0, target_modules=["q_proj", "down_proj"])
    judge.save_pretrained(tmp_path)
    engine = BuiltinEngine(
        BuiltinSettings(), tiny("qwen3"), tokenizer, adapters={"judge": AdapterFiles.at(str(tmp_path))}
    )

    async def ask():
        before = await engine.generate(GenerationRequest("a", SEQUENCES[2], SamplingParams(8, adapter="judge")))
        scored = await engine.score("b", SEQUENCES[2])
        return (
            before,
            scored,
            await engine.generate(GenerationRequest("c", SEQUENCES[2], SamplingParams(8, adapter="judge"))),
        )

    before, scored, after = finish(ask())
    expected = forward(tiny("qwen3"), SEQUENCES[2])[:-1].log_softmax(-1)
    own = expected.gather(1, torch.tensor(SEQUENCES[2][1:])[:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(scored.logprobs[1:]), own, atol=1e-5, rtol=1e-5)
    assert (before.token_ids, before.logprobs) == (after.token_ids, after.logprobs), "the adapter is back"


def test_turns_hold_as_many_tokens_as_may_be():
    assert list(in_turns([(1,) * n for n in (3, 4, 9, 1, 8, 2)], 8)) == [[0, 1], [2], [3], [4], [5]]
    assert list(in_turns([], 8)) == []
