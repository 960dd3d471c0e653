"""`Guard`: text that is not the template's never becomes a control token."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from hone.data.messages import RenderingError, Tools
from hone.data.templates.forms import EXAMPLE_TOOLS, QUESTION, THOUGHT, Rendering
from hone.types import Message

GUARD = "\ufdd0"  # stands within text that must not become a special token
_KNOWN = ("system", "user", "assistant", "tool")  # roles of which templates make no token by accident
_NO_ROLE = "role-5e07ab"
_PLACES = 256  # roles that are remembered
REPLACEMENT = "\ufffd"  # for a character that a tokenizer reads as a token
ESCAPED_GUARD = "\\ufdd0"  # as Python prints it, and JSON of ASCII
_RESERVED = re.compile("[\ufdd0-\ufdef]")  # characters that no text has: Unicode keeps them for a program's own use
_FRAMES = re.compile(  # names of special tokens with which models begin and end messages and texts
    r"(?:begin|start|end)[_▁ ]?(?:of)?[_▁ ]?(?:text|sentence|sequence|turn|message|header)"
    r"|(?<![a-z])(?:bos|eos|eot|eom|pad)(?![a-z])|im_(?:start|end|sep)",
    re.IGNORECASE,
)


class Guard:
    """Marks text that is not the template's wherever it looks like a token of the tokenizer, so that it stays text.

    In what others say every special token is marked. In results of tools, in tools themselves, in the names and
    arguments of calls and in what an environment says after an answer, it is every token that the tokenizer adds. The
    policy's own words may hold such tokens (`<think>`), but none that begins or ends a message, and no special token of
    the tokenizer (`all_special_tokens`).

    Tokenizers that normalise a text find some tokens afterwards: with NFKC, `<x>` in wide letters too (`_Tokens`).
    """

    def __init__(self, template: Rendering, tokenizer: Any) -> None:
        known = list(tokenizer.added_tokens_decoder.values())
        normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)
        self._template = template
        self._roles: set[str] = set(_KNOWN)  # of which the template makes no control token
        self._normalize = None if normalizer is None else normalizer.normalize_str
        self._normalized = {str(token) for token in known if token.normalized} if self._normalize else set()
        added = {str(token) for token in known} | set(tokenizer.all_special_tokens)
        self._added = self._tokens(added)
        frame = _framing(template, tokenizer, self._added.plain)
        self._framing = self._tokens(frame)
        self._special = self._tokens(frame | set(template.special))
        looked_for = [_RESERVED.pattern, *([self._added.plain.pattern] if self._added.plain else [])]
        self.anything = re.compile("" if self._added.hidden else "|".join(looked_for))
        """Texts that may have to be marked: a message without them stays as it is."""

    def _tokens(self, texts: Set[str]) -> _Tokens:
        if self._normalize is None:
            return _Tokens(_any_of(texts))
        hidden = _any_of(self._normalize(text) for text in texts & self._normalized)
        return _Tokens(_any_of(texts), hidden, self._normalize)

    def message(self, message: Message, *, strict: bool = False) -> Message:
        """The message with a mark in everything that looks like a token; `strict`: an environment says it.

        Raises RenderingError for a role of which the template makes a control token.
        """
        role = message["role"]
        others = self._added if strict or role in ("tool", "assistant") else self._special
        guarded: dict[str, Any] = {}
        for key, value in message.items():
            own = role == "assistant" and key in ("content", "reasoning_content")
            guarded[key] = _marked(value, self._framing if own else others)
        self._check_role(guarded["role"])
        return cast(Message, guarded)

    def _check_role(self, role: str) -> None:
        """Raise RenderingError for a role such as `end`, of which `'<|' + role + '|>'` makes `<|end|>`."""
        if role in self._roles:
            return
        counts = []
        for name in (role, _NO_ROLE):
            with suppress(RenderingError):  # then it refuses the conversation, too, or knows the role by name
                text = self._template.render([QUESTION, Message(role=name, content="said")], opening=False)
                counts.append(self._framing.count(text))
        if len(counts) == 2 and counts[0] > counts[1]:
            raise RenderingError(
                f"a message has the role {role.replace(GUARD, '')!r:.60}, of which the chat template makes a token "
                f"that begins or ends messages; write one of {', '.join(_KNOWN)}, or another name"
            )
        if len(self._roles) >= _PLACES:
            self._roles = set(_KNOWN)
        self._roles.add(role)

    def tools(self, tools: Tools) -> Tools:
        """JSON schemas with the same marks in their names, keys and descriptions."""
        return [_marked(tool, self._added) for tool in tools]

    def said(self, text: str) -> str:
        """A text of the policy."""
        return self._framing.marked(text)

    def told(self, text: str) -> str:
        """A text of a tool."""
        return self._added.marked(text)


def _framing(template: Rendering, tokenizer: Any, added: re.Pattern[str] | None) -> set[str]:
    """The tokens that frame a message, and the tokenizer's own."""
    own = {tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token, tokenizer.unk_token} - {None}
    if template.text is None or added is None:
        return own
    try:
        example = template.render([QUESTION], opening=True)
        ends = {text for text, number in template.special.items() if number in template.ends}
    except RenderingError:  # it takes other conversations only
        example, ends = "".join(template.special), set()
    with suppress(RenderingError):  # the template cannot render tools
        result = Message(role="tool", content="result", name="tool", tool_call_id="call00000")
        example += template.continuation([result], EXAMPLE_TOOLS)
    named = {text for text in template.special if _FRAMES.search(text)}
    frame = {found for found in {*added.findall(example), *named} if not THOUGHT.search(found)}
    return own | ends | frame


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Tokens to be found in texts."""

    plain: re.Pattern[str] | None
    hidden: re.Pattern[str] | None = None  # those that the tokenizer looks for in a normalised text, as it looks then
    normalize: Callable[[str], str] = str

    def marked(self, text: str) -> str:
        """The text with a mark in each token, after its first character, or elsewhere in one that is hidden."""
        text = _RESERVED.sub("", text)
        if self.plain is not None:
            text = self.plain.sub(lambda found: found[0][0] + GUARD + found[0][1:], text)
        return text if self.hidden is None else GUARD.join(map(self._apart, text.split(GUARD)))

    def count(self, text: str) -> int:
        """The number of these tokens in a text."""
        found = 0 if self.plain is None else len(self.plain.findall(text))
        return found if self.hidden is None else found + len(self.hidden.findall(self.normalize(text)))

    def _apart(self, text: str) -> str:
        """The text with marks where two halves have a hidden token that neither half has."""
        assert self.hidden is not None
        if not self.hidden.search(self.normalize(text)):
            return text
        middle = len(text) // 2
        return self._apart(text[:middle]) + GUARD + self._apart(text[middle:]) if middle else REPLACEMENT


def _marked(value: Any, tokens: _Tokens) -> Any:
    """The value with marks in all its texts and keys."""
    if isinstance(value, str):
        return tokens.marked(value)
    if isinstance(value, Mapping):
        return {_marked(key, tokens): _marked(one, tokens) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_marked(one, tokens) for one in value]
    return value


def _any_of(texts: Iterable[str]) -> re.Pattern[str] | None:
    """A pattern of any of these texts of two characters or more, the longest first."""
    longest_first = sorted((text for text in texts if len(text) > 1), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))) if longest_first else None
