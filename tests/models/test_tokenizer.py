"""The character tokenizer, and loading of tokenizers."""

import pytest

from hone.models.errors import ModelError
from hone.models.settings import BuildConfig, ModelConfig
from hone.models.tokenizer import build_tokenizer, load_tokenizer

MESSAGES = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "2+2?\n"},
    {"role": "assistant", "content": "4"},
]


@pytest.fixture
def tokenizer():
    return build_tokenizer(BuildConfig())


def test_every_character_is_a_token_and_text_survives(tokenizer):
    text = "Sort  3, 1\n<b>~ 2."
    ids = tokenizer(text).input_ids
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer("a\nb").input_ids == [
        8 + 1 + 65,
        8,
        8 + 1 + 66,
    ]  # 8 special tokens, newline, then from the space on
    assert len(tokenizer) == 8 + 96


def test_special_tokens_have_their_ids(tokenizer):
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    assert tokenizer("é").input_ids == [tokenizer.unk_token_id]
    assert tokenizer.decode([1, 74, 2, 0], skip_special_tokens=True) == "a"


def test_the_chat_template_only_appends(tokenizer):
    rendered = tokenizer.apply_chat_template(MESSAGES[:2], tokenize=False, add_generation_prompt=True)
    assert rendered == "<bos><system>Add.<user>2+2?\n<assistant>"
    whole = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    assert whole == rendered + "4<eos>"
    assert tokenizer(whole).input_ids[-2:] == [tokenizer("4").input_ids[0], tokenizer.eos_token_id]


def test_a_saved_tokenizer_loads_to_the_same(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(ModelConfig(path=str(tmp_path)))
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False)
    assert loaded.apply_chat_template(MESSAGES, tokenize=False) == text
    assert loaded(text).input_ids == tokenizer(text).input_ids
    other = load_tokenizer(ModelConfig(build=BuildConfig(characters="01"), tokenizer=str(tmp_path)))
    assert other(text).input_ids == tokenizer(text).input_ids


def test_an_alphabet_of_ones_own():
    tokenizer = build_tokenizer(BuildConfig(characters="01 "))
    assert tokenizer("1 0").input_ids == [9, 10, 8]
    for characters in ("", "010"):
        with pytest.raises(ModelError, match="each character once"):
            build_tokenizer(BuildConfig(characters=characters))


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"model\.tokenizer: folder .* has no tokenizer_config\.json"):
        load_tokenizer(ModelConfig(build=BuildConfig(), tokenizer=str(tmp_path)))
    (tmp_path / "tokenizer_config.json").write_text('{"auto_map": {"AutoTokenizer": ["a.B", null]}}')
    with pytest.raises(ModelError, match="comes with Python code"):
        load_tokenizer(ModelConfig(build=BuildConfig(), tokenizer=str(tmp_path)))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Nothing"}')
    with pytest.raises(ModelError, match="has no usable tokenizer"):
        load_tokenizer(ModelConfig(build=BuildConfig(), tokenizer=str(tmp_path)))


@pytest.mark.parametrize("text", ["[]", "null", "3", "{", "", "[" * 100_000])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_file_of_a_tokenizer_is_one_sentence(tmp_path, name, text):
    build_tokenizer(BuildConfig()).save_pretrained(tmp_path)
    model = ModelConfig(build=BuildConfig(), tokenizer=str(tmp_path))
    load_tokenizer(model)
    (tmp_path / name).write_text(text)
    with pytest.raises(ModelError, match=r"^model\.tokenizer.*(no usable tokenizer|JSON)") as raised:
        load_tokenizer(model)
    assert "\n" not in str(raised.value)
