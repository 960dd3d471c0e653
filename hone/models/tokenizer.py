"""Tokenizers: a model's own, or a character tokenizer for models that hone builds."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hone.models.errors import ModelError
from hone.models.settings import BuildConfig, ModelConfig
from hone.models.source import check_source, locate

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PAD, BOS, EOS, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
ROLES = ("system", "user", "assistant", "tool")
SPECIAL_TOKENS = (PAD, BOS, EOS, UNKNOWN, *(f"<{role}>" for role in ROLES))
IMAGE = "<|image_pad|>"
VISION_TOKENS = ("<|vision_start|>", IMAGE, "<|vision_end|>", "<|video_pad|>")  # the last ids, for models with images

# A message is its role's token and its text; assistant messages end with <eos>. Another message only appends tokens, so
# a conversation never has to be re-encoded.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ '<' + message['role'] + '>' }}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "{{ '<|vision_start|><|image_pad|><|vision_end|>' }}{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)


def load_tokenizer(model: ModelConfig) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model: its own, the one named by `tokenizer`, or one built from the alphabet.

    Raises ModelError with the key and the reason.
    """
    source = model.tokenizer or model.path
    if source is None:
        assert model.build is not None
        return build_tokenizer(model.build)
    key = model.key_of("tokenizer" if model.tokenizer else "path")
    revision = None if model.tokenizer else model.revision
    config = check_source(source, key, "tokenizer_config.json", model.trust_remote_code, revision)
    try:
        loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            locate(source, key, revision, weights=False).folder, trust_remote_code=model.trust_remote_code
        )
    except (OSError, ValueError, LookupError, ImportError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(f"{key} {source!r} has no usable tokenizer: {_first_line(error)}") from error
    if loaded.eos_token_id is None:
        raise ModelError(f"{key} {source!r} has a tokenizer without an end-of-sequence token (found {sorted(config)})")
    known = range(len(loaded))  # some configs list -1, or ids of another vocabulary
    loaded.generation_ends = tuple(end for end in _generation_ends(model) if end in known)  # answers end there too
    return loaded


def _generation_ends(model: ModelConfig) -> tuple[int, ...]:
    """The end-of-sequence ids of the model's generation config; () without one. Raises ModelError for a broken file.

    Chat models list several there: gpt-oss also stops after a call of a tool, GLM at the token of the next message.
    """
    if model.path is None:
        return ()
    path = locate(model.path, model.key_of("path"), model.revision, weights=False).folder / "generation_config.json"
    if not path.is_file():
        return ()
    try:
        found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
    except (ValueError, AttributeError, RecursionError) as error:
        raise ModelError(f"{path} should hold a JSON object: {error}") from error
    ends = found if isinstance(found, list) else [] if found is None else [found]
    if wrong := [end for end in ends if not isinstance(end, int) or isinstance(end, bool)]:
        raise ModelError(f"{path}: eos_token_id should be the id of a token, or a list of ids, found {wrong[0]!r:.80}")
    return tuple(ends)


def build_tokenizer(build: BuildConfig) -> PreTrainedTokenizerFast:
    """Build a tokenizer: special tokens, then one token per character of the alphabet, and a chat template.

    Encoding adds no special tokens; other characters become <unk>. Raises ModelError for an unusable alphabet.
    """
    repeated = sorted({c for c in build.characters if build.characters.count(c) > 1})
    if not build.characters or repeated:
        raise ModelError(f"model.build.characters should hold each character once, found {repeated or 'none'}")
    vision = VISION_TOKENS if build.vision is not None else ()
    special = (*SPECIAL_TOKENS, *vision)
    vocabulary = {token: number for number, token in enumerate((*special, *build.characters))}
    backend: Any = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        extra_special_tokens=[*(f"<{role}>" for role in ROLES), *vision],
        model_max_length=build.max_positions,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def vocabulary_digest(tokenizer: Any) -> str:
    """SHA-256 of the token of each id: equal for tokenizers whose ids mean the same tokens."""
    listed = sorted((number, token) for token, number in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(listed).encode()).hexdigest()


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
