"""Reward models as most are published: transformers' sequence classification with one label, and its scores."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Qwen3Config

from hone.config import ConfigError
from hone.data.rendering import Renderer
from hone.models.errors import ModelError
from hone.models.loading import has_value_head, load_language_model, load_value_model, without_progress_bars
from hone.models.settings import BuildConfig, ModelConfig
from hone.models.tokenizer import load_tokenizer, vocabulary_digest
from hone.models.value_head import VALUE_HEAD_FILE, to_classifier
from hone.rewards.model import Answer
from hone.rewards.settings import RewardModelConfig
from hone.trainers.exports.checkpoint import export_checkpoint
from hone.trainers.reward_models.scorer import AnswerScorer, reward_model_spec
from hone.workers.train import TrainWorker
from tests.trainers.preference_task import prefer, train_reward_model, written

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
    ask = AnswerScorer(config, POLICY, worker)
    found = [one.value for one in ask([answer("c"), answer("dad")])]
    tokenizer = load_tokenizer(ModelConfig(path=str(tmp_path)))
    for said, score in zip(("c", "dad"), found, strict=True):
        whole = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": said}]
        ids = tokenizer.apply_chat_template(whole, return_tensors="pt", return_dict=True)["input_ids"]
        with torch.no_grad():
            assert score == pytest.approx(float(model(ids).logits[0, 0]), abs=1e-5)
    (failed,) = ask([answer("c", turns=2)])
    assert "reads rendered conversations, and an answer of 2 turns" in failed.error


def test_it_reads_the_tools_of_the_prompt(tmp_path):
    """As the template renders them, in a policy's conversation as in the comparisons that it was trained on."""
    model = classifier(tmp_path)
    tokenizer = load_tokenizer(ModelConfig(path=str(tmp_path)))
    tokenizer.chat_template = "{% for tool in tools or [] %}{{ tool.name }}{% endfor %}" + tokenizer.chat_template
    tokenizer.save_pretrained(tmp_path)
    config = RewardModelConfig(path=str(tmp_path), compute_dtype="float32")
    worker = TrainWorker(reward_model_spec(config))
    worker.initialize()
    tools = ({"name": "dad"},)
    without, found = AnswerScorer(config, POLICY, worker)([answer("c"), replace(answer("c"), tools=tools)])
    whole = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    ids = tokenizer.apply_chat_template(whole, tools=[*tools], return_tensors="pt", return_dict=True)["input_ids"]
    with torch.no_grad():
        assert found.value == pytest.approx(float(model(ids).logits[0, 0]), abs=1e-5)
    assert abs(found.value - without.value) > 1e-3


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
    with pytest.raises(ModelError, match="has 2 classes"):
        reward_model_spec(RewardModelConfig(path=str(tmp_path / "two")))
    classifier(tmp_path / "one")
    config = RewardModelConfig(path=str(tmp_path / "one"), aggregation="min")
    with pytest.raises(ConfigError, match="aggregation is for process reward models"):
        AnswerScorer(config, POLICY, lambda batch: None)


# ----------------------------------------------------------------------------------------------------- exported as one

LORA = ("actor.lora.rank=4", "actor.lora.modules_to_save=[score]")


def asked(folder):
    """What hone's scorer says of two answers of a policy with the same vocabulary."""
    config = RewardModelConfig(path=str(folder), compute_dtype="float32")
    worker = TrainWorker(reward_model_spec(config))
    worker.initialize()
    tokenizer = load_tokenizer(ModelConfig(path=str(folder)))
    answers = []
    for said in ("abcd", "dbca"):
        ids = tuple(tokenizer(said)["input_ids"])
        prompt = (1, 5, *tokenizer("dbca")["input_ids"], 6)
        answers.append(Answer((*prompt, *ids, 2), len(prompt), ({"role": "user", "content": "dbca"},), said, 1))
    scorer = AnswerScorer(config, vocabulary_digest(tokenizer), worker)
    return [one.value for one in scorer(answers)]


@pytest.mark.parametrize("overrides", [(), LORA], ids=["all weights", "adapter"])
def test_a_trained_reward_model_is_exported_as_a_classifier_with_the_same_scores(tmp_path, overrides):
    run = train_reward_model(written(tmp_path, "reward_model", "bradley_terry"), *overrides)
    expected = asked(run / "export")
    assert abs(expected[0] - expected[1]) > 1e-3
    folder = tmp_path / "classifier"
    export_checkpoint(run, folder, classifier=True)
    assert not (folder / VALUE_HEAD_FILE).exists()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    said = [
        [{"role": "user", "content": "dbca"}, {"role": "assistant", "content": answer}] for answer in ("abcd", "dbca")
    ]
    batch = tokenizer.apply_chat_template(said, return_tensors="pt", return_dict=True, padding=True)
    loaded, report = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    with torch.no_grad():
        scores = loaded(**batch).logits[:, 0].tolist()
    assert scores == pytest.approx(expected, abs=1e-5)
    assert asked(folder) == pytest.approx(expected, abs=1e-5)
    opened = tokenizer.apply_chat_template(said[0], add_generation_prompt=True, tokenize=False)
    assert opened == "<bos><user>dbca<assistant>abcd<eos><assistant>"
    whole = export_checkpoint(run, tmp_path / "whole", merge=bool(overrides))
    assert whole.name == "step_00000008"
    assert asked(tmp_path / "whole") == pytest.approx(expected, abs=1e-5)


def test_only_what_scores_whole_answers_is_exported_as_a_classifier(tmp_path):
    policy = prefer(written(tmp_path / "a", "prefer", "dpo"), "run.steps=1")
    with pytest.raises(ConfigError, match="trained no model that scores a whole answer"):
        export_checkpoint(policy, tmp_path / "out", classifier=True)
    assert not (tmp_path / "out").exists()


def test_an_architecture_without_a_classifier_is_refused(tmp_path):
    with without_progress_bars():
        model = load_value_model(ModelConfig(build=BuildConfig(characters="abcd", architecture="granite")))
        model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="transformers has no sequence classifier of the architecture 'granite'"):
        to_classifier(tmp_path, 0)


def test_weights_in_several_files_stay_so(tmp_path):
    model = load_value_model(ModelConfig(build=BuildConfig(characters="abcd")))
    torch.nn.init.normal_(model.score.weight)
    with without_progress_bars():
        model.save_pretrained(tmp_path)
        model.body.save_pretrained(tmp_path, max_shard_size="200KB")
    (tmp_path / "model.safetensors").unlink(missing_ok=True)
    count = len(list(tmp_path.glob("model-*.safetensors")))
    assert count > 1
    to_classifier(tmp_path, 0)
    assert len(list(tmp_path.glob("*.safetensors"))) == count
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(loaded.score.weight, model.score.weight)
    again = load_value_model(ModelConfig(path=str(tmp_path)))
    for name, weight in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], weight), name


@pytest.mark.parametrize(
    ("template", "ends"),
    [
        (None, "ab"),
        (
            "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<eos>\n' }}{% endfor %}\n",
            "user: ab<eos>\nassistant: c",
        ),
        (
            "{% for m in messages %}{% if m['role'] == 'user' %}{{ '<user>' + m['content'] }}{% else %}"
            "{% generation %}{{ m['content'] + '<eos>' }}{% endgeneration %}{% endif %}{% endfor %}",
            "<user>ab" + "c",
        ),
    ],
    ids=["none", "a line after the end", "marked"],
)
def test_the_template_of_a_classifier_stops_before_the_end_token(template, ends, tmp_path):
    tokenizer = load_tokenizer(ModelConfig(build=BuildConfig()))
    tokenizer.chat_template = template
    Renderer(tokenizer).save_endless_template(tmp_path)
    saved = AutoTokenizer.from_pretrained(tmp_path)
    said = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]
    rendered = saved.apply_chat_template(said, tokenize=False)
    assert rendered == (ends if template else ends + "c")
    if template:
        assert rendered + "<eos>" == tokenizer.apply_chat_template(said, tokenize=False).rstrip()
