"""`TextCodec`: how an episode converts between tokens and what an environment sends and reads."""

from __future__ import annotations

from collections.abc import Sequence

from hone.config import ConfigError
from hone.data.chat_template import is_plain
from hone.data.messages import Tools, normal_message
from hone.envs.base import Language, Start
from hone.envs.tool_calls import ParseFn, Said, split_thought
from hone.types import Completion, Message, Prompt

_REMEMBERED = 1024  # rendered starts


class TextCodec:
    """Messages to tokens, completions to what was said, for the episodes of a run."""

    def __init__(self, language: Language, parse: ParseFn) -> None:
        self.answer = language.answer
        self._language = language
        self._parse = parse
        self._rendered: dict[str, tuple[int, ...]] = {}  # the samples of a prompt start with the same messages

    def opening(self, start: Start, prompt: Prompt) -> tuple[int, ...]:
        """The tokens of a start with messages, for the episode of a prompt.

        Raises ConfigError if the chat template does not show its tools, or if the start lacks a tool of the prompt.
        """
        if missing := sorted(_names(prompt.tools) - _names(start.tools)):
            raise ConfigError(
                f"prompt {prompt.prompt_id} offers tools in its column of tools that its environment (episode.env) "
                f"does not have: {', '.join(missing)}; remove the column, or write an environment that offers "
                "prompt.tools"
            )
        key = repr((start.messages, start.tools))
        if key not in self._rendered:
            if len(self._rendered) >= _REMEMBERED:
                self._rendered.clear()
            self._rendered[key] = self._render(start)
        return self._rendered[key]

    def _render(self, start: Start) -> tuple[int, ...]:
        if start.tools and not self._language.renders_tools(start.messages, start.tools):
            raise ConfigError(
                "episode.env: the chat template does not show tools to the model; set data.chat_template to one that "
                "renders `tools`"
            )
        return self._language.render_prompt(start.messages, start.tools)

    def continuation(
        self, ids: Sequence[int], messages: Sequence[Message], tools: Tools, max_tokens: int
    ) -> tuple[int, ...]:
        """The tokens to append after an answer; texts are cut to `max_tokens` together."""
        share = max(1, max_tokens // len(messages))
        normal = [one if is_plain(one) else normal_message(one, lenient=True) for one in messages]
        short = [
            Message(**{**one, "content": self._language.shorten(one["content"], share)})
            if isinstance(one.get("content"), str)
            else one
            for one in normal
        ]
        return self._language.render_continuation(ids, short, tools)

    def said(self, completion: Completion, text: str, tools: Tools) -> Said:
        """Parse a completion with this text; calls are looked for only where tools were offered."""
        if not tools:
            thought, content = split_thought(text)
            return Said(content, thought)
        ids, ends = list(completion.token_ids), self._language.end_token_ids
        while ids and ids[-1] in ends:
            ids.pop()
        thought, rest = split_thought(self._language.decode(ids, keep_special=True))
        content, calls = self._parse(rest)
        return Said(content.strip(), thought, calls)


def _names(tools: Tools) -> set[str]:
    """Names of functions by their JSON schemas, with or without `{"type": "function", "function": ...}` around them."""
    return {str(tool.get("function", tool).get("name", tool)) for tool in tools}
