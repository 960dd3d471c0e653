"""Messages and tokens without a tokenizer."""


class Language:
    """One token for each character; an observation is one token."""

    end_token_ids = frozenset({0})
    template = ""
    opened_thought = ""

    def decode(self, ids, *, keep_special=False):
        return "".join(map(chr, ids))

    def render_prompt(self, messages, tools=()):
        return (1,)

    def answer(self, ids):
        return self.decode(ids)

    def render_continuation(self, ids, messages, tools=()):
        return (7,)

    def renders_tools(self, messages, tools):
        return True

    def shorten(self, text, max_tokens):
        return text[: 4 * max_tokens]
