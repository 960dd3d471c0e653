"""Reward models as most are published: transformers' sequence classification with one label, and its scores."""

import pytest
import torch
from transformers import AutoModelForSequenceClassification, Qwen3Config

from hone.config import ConfigError
from hone.models.errors import ModelError
from hone.models.loading import has_value_head, load_language_model, load_value_model, without_progress_bars
from hone.models.settings import BuildConfig, ModelConfig
from hone.models.tokenizer import load_tokenizer, vocabulary_digest
from hone.rewards.model import Answer
from hone.rewards.settings import RewardModelConfig
from hone.trainers.scoring import AnswerScorer, reward_model_spec
from hone.workers.train import TrainWorker

BUILD = BuildConfig(characters="abcd")
POLICY = vocabulary_digest(load_tokenizer(ModelConfig(build=BUILD)))


def classifier(folder, labels=1):
    config = Qwen3Config(
        vocab_size=12,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=32,
        num_labels=labels,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").eval()
    torch.nn.init.normal_(model.score.weight)
    with without_progress_bars():
        model.save_pretrained(folder)
    load_tokenizer(ModelConfig(build=BUILD)).save_pretrained(folder)
    return model


def answer(text, turns=1):
    return Answer((1, 5, 8, 6, 9, 2), 4, ({"role": "user", "content": "ab"},), text, turns)


def test_the_score_is_that_of_transformers(tmp_path):
    model = classifier(tmp_path)
    config = RewardModelConfig(path=str(tmp_path), compute_dtype="float32")
    worker = TrainWorker(reward_model_spec(config))
    worker.initialize()
    ask = AnswerScorer(config, POLICY, worker.infer_batch)
    found = [one.value for one in ask([answer("c"), answer("dad")])]
    tokenizer = load_tokenizer(ModelConfig(path=str(tmp_path)))
    for said, score in zip(("c", "dad"), found, strict=True):
        whole = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": said}]
        ids = tokenizer.apply_chat_template(whole, return_tensors="pt", return_dict=True)["input_ids"]
        with torch.no_grad():
            assert score == pytest.approx(float(model(ids).logits[0, 0]), abs=1e-5)
    (failed,) = ask([answer("c", turns=2)])
    assert "reads rendered conversations, and an answer of 2 turns" in failed.error


def test_its_head_begins_a_critic(tmp_path):
    model = classifier(tmp_path)
    assert has_value_head(ModelConfig(path=str(tmp_path)))
    critic = load_value_model(ModelConfig(path=str(tmp_path)))
    assert torch.equal(critic.score.weight, model.score.weight)


def test_what_is_no_reward_model_is_refused(tmp_path):
    with without_progress_bars():
        load_language_model(ModelConfig(build=BUILD)).save_pretrained(tmp_path / "language")
    with pytest.raises(ConfigError, match=r"is not a reward model: it has no value_head\.safetensors"):
        reward_model_spec(RewardModelConfig(path=str(tmp_path / "language")))
    classifier(tmp_path / "two", labels=2)
    with pytest.raises(ModelError, match="tells 2 classes apart"):
        reward_model_spec(RewardModelConfig(path=str(tmp_path / "two")))
    classifier(tmp_path / "one")
    config = RewardModelConfig(path=str(tmp_path / "one"), aggregation="min")
    with pytest.raises(ConfigError, match="aggregation is for process reward models"):
        AnswerScorer(config, POLICY, lambda batch: None)
