"""Reply to a client: the text of an answer with its tool calls, and the prompt if the request asks for it."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from functools import cache
from typing import Any

from hone.envs.agents.protocol import Answer, BadRequest, ChatRequest, Echo, TextRequest
from hone.envs.base import Language
from hone.envs.tool_calls import ParseFn, arguments_text, opening_of
from hone.types import Completion, Scored


def check_tools(body: ChatRequest | TextRequest, parse_tools: ParseFn | None) -> None:
    """Raise BadRequest for tools whose calls could not be found in an answer."""
    if parse_tools is None and isinstance(body, ChatRequest) and body.offered:
        raise BadRequest(
            "tools are offered, but the chat template of this model renders tool calls in no form that hone knows; "
            "set episode.env.parser (hone list parsers)",
            "unsupported",
        )


def require_trainable(body: ChatRequest | TextRequest, client_sampling: bool) -> None:
    """Raise BadRequest for an answer of the policy under a constraint, unless requests choose the sampling."""
    if isinstance(body, ChatRequest) and body.json_schema and not client_sampling:
        raise BadRequest(
            "response_format: the answer would be sampled from the tokens that the schema allows, and the trainer's "
            "log-probs are over the whole vocabulary. If this is wanted, set episode.env.client_sampling = true",
            "unsupported",
        )


def opening_for(body: ChatRequest, parse_tools: ParseFn | None) -> str:
    """Return the text that the answer has to begin with: the start of a call, if the request asks for one."""
    if body.called is None or parse_tools is None:
        return ""
    return opening_of(parse_tools, body.called)


def answer_to(
    language: Language,
    parse_tools: ParseFn | None,
    completion: Completion,
    body: ChatRequest | TextRequest,
    opening: str = "",
) -> Answer:
    """Return what the client sees: no special tokens, nothing after a stop string, tool calls separate."""
    said = language.decode(completion.token_ids)
    end, stopped_by = min(((said.find(stop), stop) for stop in body.stops if stop in said), default=(None, None))
    text = opening + said[:end]
    calls: list[dict[str, Any]] = []
    if isinstance(body, ChatRequest) and body.offered and parse_tools is not None:
        content, found = parse_tools(text)
        whole = [{"name": one.name, "arguments": arguments_text(one)} for one in found if not one.error]
        calls = [{"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": one} for one in whole]
        if calls:  # a broken call stays text
            text = content + "".join(one.text for one in found if one.error)
    wanted = body.logprobs if isinstance(body, ChatRequest) else body.logprobs is not None
    tokens = [language.decode([one], keep_special=True) for one in completion.token_ids] if wanted else []
    return Answer(completion, text, tuple(calls), tuple(tokens), stopped_by)


def echo_of(language: Language, body: TextRequest, prompt: Sequence[int], scored: Scored | None) -> Echo:
    """The prompt as an answer with `echo` shows it, with its log-probs if it was scored."""
    asked = body.only_prompt
    text = asked if isinstance(asked, str) else language.decode(prompt, keep_special=True)
    if scored is None:
        return Echo(text)

    @cache
    def shown(token: int) -> str:
        return language.decode([token], keep_special=True)

    tokens = tuple(map(shown, prompt))
    logprobs = (None, *scored.logprobs[1:])
    if not body.alternatives:
        return Echo(text, tokens, logprobs)
    top: list[dict[str, float] | None] = [None]
    for place in range(1, len(tokens)):
        likely = zip(scored.top_ids[place], scored.top_logprobs[place], strict=True)
        # two tokens may have the same text, such as halves of a character: the more likely one counts
        texts = {shown(one): value for one, value in reversed(list(likely))}
        top.append({tokens[place]: scored.logprobs[place], **texts})
    return Echo(text, tokens, logprobs, tuple(top))


__all__ = ["answer_to", "check_tools", "echo_of", "opening_for", "require_trainable"]
