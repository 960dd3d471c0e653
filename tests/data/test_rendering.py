"""Rendering: whatever the template's shape, a sample has the ids of a rollout and the loss is on the answers only."""

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hone.data.chat_template import RenderingError
from hone.data.rendering import Renderer

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + "
    "message.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ['user', 'assistant'] %}{{ raise_exception('role ' + message.role + ' unknown') }}"
    "{% endif %}"
    "{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else 'user') + '\\n' + message.content | trim + "
    "'<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
)
# like Qwen3's: earlier answers lose their thoughts, and the last answer gets an empty thought if it has none
FORGETFUL = (
    "{% set state = namespace(last=-1) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set state.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}{% set content = message.content %}"
    "{% if message.role == 'assistant' %}{% set thought = '' %}{% if '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{% set content = content.split('</think>')[-1].lstrip() %}{% endif %}"
    "{{ '<|im_start|>assistant\\n' }}{% if loop.index0 > state.last and (loop.last or thought) %}"
    "{{ '<think>\\n' + thought + '\\n</think>\\n\\n' }}{% endif %}{{ content + '<|im_end|>\\n' }}"
    "{% else %}{{ '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
    "{% endif %}"
)
MARKED = (
    "{% for message in messages %}\n"
    "{{- '<|im_start|>' + message.role + '\\n' }}\n"
    "{%- if message.role == 'assistant' %}\n"
    "  {%- generation %}{{ message.content + '<|im_end|>' }}{%- endgeneration %}\n"
    "{%- else %}{{ message.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}\n"
    "{%- endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKED_WITHOUT_END = MARKED.replace(
    "{{ message.content + '<|im_end|>' }}{%- endgeneration %}",
    "{{ message.content }}{%- endgeneration %}{{ '<|im_end|>' }}",
)
SHAPES = {
    "chatml": (CHATML, "<|im_end|>"),
    "llama": (LLAMA, "<|eot_id|>"),
    "gemma": (GEMMA, "<end_of_turn>"),
    "forgetful": (FORGETFUL, "<|im_end|>"),
    "marked": (MARKED, "<|im_end|>"),
}


def user(text):
    return {"role": "user", "content": text}


def assistant(text):
    return {"role": "assistant", "content": text}


CONVERSATION = [
    user("What is 2 + 2?"),
    assistant("It is 4."),
    user("\n\nAnd 3 + 4?"),
    assistant("The answer is 7.\n#### 7"),
]


@pytest.fixture(params=SHAPES)
def shape(request, make_tokenizer):
    template, end = SHAPES[request.param]
    return request.param, Renderer(make_tokenizer(template)), end


def learnt(renderer, ids, mask):
    """The texts of the runs of ones in a mask."""
    runs, current = [], []
    for token, one in [*zip(ids, mask, strict=True), (0, 0)]:
        if one:
            current.append(token)
        elif current:
            runs.append(renderer.decode(current, keep_special=True))
            current = []
    return runs


def test_a_prompt_is_what_the_template_says(shape):
    _, renderer, _ = shape
    whole = renderer.tokenizer.apply_chat_template(CONVERSATION[:1], add_generation_prompt=True, tokenize=False)
    ids = renderer.render_prompt(CONVERSATION[:1])
    assert renderer.decode(ids, keep_special=True) == whole
    assert list(ids) == renderer.tokenizer(whole, add_special_tokens=False)["input_ids"]


def test_the_loss_is_on_the_answers_and_their_end(shape):
    name, renderer, end = shape
    thought = "<think>\n\n</think>\n\n" if name == "forgetful" else ""
    ids, mask = renderer.render_sample(CONVERSATION)
    assert len(ids) == len(mask)
    assert learnt(renderer, ids, mask) == [f"{thought}It is 4.{end}", f"{thought}The answer is 7.\n#### 7{end}"]


def test_a_sample_is_the_template_up_to_the_last_end(shape):
    name, renderer, end = shape
    if name == "forgetful":
        conversation = CONVERSATION[:2]  # with more turns this template rewrites the first answer
    else:
        conversation = CONVERSATION
    whole = renderer.tokenizer.apply_chat_template(conversation, tokenize=False)
    text = renderer.decode(renderer.render_sample(conversation)[0], keep_special=True)
    assert text == whole[: whole.rindex(end) + len(end)]


@pytest.mark.parametrize("answer", ["It is 4.", "\n\nIt is\n\n 4 ", " 4"])
def test_a_sample_has_the_ids_of_a_rollout_of_the_same_answers(shape, answer):
    name, renderer, end = shape
    if name in ("llama", "gemma"):
        answer = answer.strip()  # these templates strip an answer, so that is what a sample can hold
    thought = "<think>\n\n</think>\n\n" if name == "forgetful" else ""
    encode = lambda text: renderer.tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
    ids = list(renderer.render_prompt(CONVERSATION[:1]))
    generated = encode(thought + answer + end)
    mask = [0] * len(ids) + [1] * len(generated)
    ids += generated
    more = list(renderer.render_continuation(ids, CONVERSATION[2:3]))
    generated = encode(thought + "7" + end)
    mask += [0] * len(more) + [1] * len(generated)
    ids += more + generated
    sample = renderer.render_sample([CONVERSATION[0], assistant(answer), CONVERSATION[2], assistant("7")])
    assert sample == (tuple(ids), tuple(mask))


def test_a_template_that_rewrites_the_past_does_not_rewrite_what_was_generated(make_tokenizer):
    renderer = Renderer(make_tokenizer(FORGETFUL))
    answers = ["<think>\nlet me think\n</think>\n\n4", "<think>\nhm\n</think>\n\n7"]
    conversation = [user("2 + 2?"), assistant(answers[0]), user("3 + 4?"), assistant(answers[1])]
    whole = renderer.tokenizer.apply_chat_template(conversation, tokenize=False)
    assert "let me think" not in whole
    ids, mask = renderer.render_sample(conversation)
    assert renderer.decode(ids, keep_special=True) == (
        "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n<think>\nlet me think\n</think>\n\n4<|im_end|>\n"
        "<|im_start|>user\n3 + 4?<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\n7<|im_end|>"
    )
    assert learnt(renderer, ids, mask) == [f"{answer}<|im_end|>" for answer in answers]


def test_chat_options_reach_the_template(make_tokenizer):
    renderer = Renderer(make_tokenizer(FORGETFUL), chat_options={"enable_thinking": False})
    assert renderer.decode(renderer.render_prompt([user("2?")])).endswith("assistant\n<think>\n\n</think>\n\n")
    ids, mask = renderer.render_sample(CONVERSATION)
    assert learnt(renderer, ids, mask) == ["It is 4.<|im_end|>", "The answer is 7.\n#### 7<|im_end|>"]


def test_a_continuation_only_appends(shape):
    name, renderer, end = shape
    prompt = renderer.render_prompt([user("hello")])
    end_id = renderer.tokenizer.convert_tokens_to_ids(end)
    finished = [*prompt, 70, 71, end_id]
    after = renderer.render_continuation(finished, [user("more")])
    text = renderer.decode(after, keep_special=True)
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    expected = {
        "llama": f"{header.format('user')}more<|eot_id|>{header.format('assistant')}",
        "gemma": "\n<start_of_turn>user\nmore<end_of_turn>\n<start_of_turn>model\n",
    }
    assert text == expected.get(name, "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n")
    cut_off = renderer.render_continuation([*prompt, 70, 71], [user("more")])
    assert cut_off == (end_id, *after)
    by_eos = renderer.render_continuation([*prompt, 70, renderer.tokenizer.eos_token_id], [user("more")])
    assert by_eos == after


def test_half_a_surrogate_pair_is_a_replacement_character(make_tokenizer):
    renderer = Renderer(make_tokenizer(CHATML))
    whole, halves = user("a\ufffdb \U0001f600"), user("a\ud83db \ud83d\ude00")  # the second pair makes a character
    assert renderer.render_prompt([halves]) == renderer.render_prompt([whole])
    assert renderer.render_sample([halves, assistant("x")]) == renderer.render_sample([whole, assistant("x")])
    asked = renderer.render_prompt([user("hello")])
    assert renderer.render_continuation(asked, [halves]) == renderer.render_continuation(asked, [whole])


def test_several_messages_of_tools_are_continued_together(make_tokenizer):
    renderer = Renderer(make_tokenizer(CHATML))
    prompt = renderer.render_prompt([user("hello")])
    tools = [{"role": "tool", "content": "5"}, {"role": "tool", "content": "6"}]
    after = renderer.render_continuation([*prompt, 70], tools)
    assert renderer.decode(after, keep_special=True) == (
        "<|im_end|>\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>tool\n6<|im_end|>\n<|im_start|>assistant\n"
    )


def test_generation_marks_agree_with_transformers(make_tokenizer):
    tokenizer = make_tokenizer(MARKED)
    ids, mask = Renderer(tokenizer).render_sample(CONVERSATION)
    theirs = tokenizer.apply_chat_template(CONVERSATION, return_dict=True, return_assistant_tokens_mask=True)
    marked = [token for token, one in zip(theirs["input_ids"], theirs["assistant_masks"], strict=True) if one]
    assert [token for token, one in zip(ids, mask, strict=True) if one] == marked
    assert list(ids) == theirs["input_ids"][: len(ids)]


def test_generation_marks_that_leave_out_the_end_token_take_it_in(make_tokenizer):
    whole = Renderer(make_tokenizer(MARKED)).render_sample(CONVERSATION)
    assert Renderer(make_tokenizer(MARKED_WITHOUT_END)).render_sample(CONVERSATION) == whole


def test_generation_marks_make_an_opening_that_differs_usable(make_tokenizer):
    opening = "{{ '<|im_start|>assistant\\n<think>\\n' }}"
    plain = CHATML.replace("{{ '<|im_start|>assistant\\n' }}", opening)
    with pytest.raises(RenderingError, match="message 1: the chat template does not render the answer after its own"):
        Renderer(make_tokenizer(plain)).render_sample(CONVERSATION)
    marked = MARKED.replace("{{ '<|im_start|>assistant\\n' }}", opening)
    renderer = Renderer(make_tokenizer(marked))
    assert learnt(renderer, *renderer.render_sample(CONVERSATION))[0] == "It is 4.<|im_end|>"


def test_without_a_template_contents_are_joined(make_tokenizer):
    renderer = Renderer(make_tokenizer())
    ids, mask = renderer.render_sample([user("5 3 ="), assistant(" 3 5")])
    assert renderer.render_prompt([user("5 3 =")]) == ids[: mask.index(1)]
    assert renderer.decode(ids, keep_special=True) == "5 3 = 3 5<eos>"
    assert learnt(renderer, ids, mask) == [" 3 5<eos>"]
    more = renderer.render_continuation(ids, [user("1 0 =")])
    assert renderer.decode(more, keep_special=True) == "1 0 ="
    only_answer = renderer.render_sample([assistant("3 5")])
    assert only_answer[1][0] == 0
    assert set(only_answer[1][1:]) == {1}


@pytest.fixture
def sentencepiece(make_tokenizer):
    """A tokenizer that marks the first word of a text with a space of its own, as Mistral's and Llama's do."""
    vocab = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", *"\u2581abcdefghijklmnopqrstuvwxyz"]
    backend = Tokenizer(models.BPE({token: number for number, token in enumerate(vocab)}, [], unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Metaspace(prepend_scheme="first", split=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", extra_special_tokens=["[INST]", "[/INST]"]
    )
    tokenizer.chat_template = (
        "{{ '<s>' }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST]' + m.content + '[/INST]' }}"
        "{% else %}{{ m.content + '</s>' }}{% endif %}{% endfor %}"
    )
    return tokenizer


def test_later_turns_get_no_mark_of_a_first_word(sentencepiece):
    """The ids of the pieces are those of the whole text."""
    messages = [user("ab"), assistant("cd"), user("ef"), assistant("gh")]
    whole = sentencepiece("<s>[INST]ab[/INST]cd</s>[INST]ef[/INST]gh</s>", add_special_tokens=False)["input_ids"]
    assert (
        sentencepiece.convert_ids_to_tokens(sentencepiece("cd", add_special_tokens=False)["input_ids"])[0] == "\u2581"
    )
    renderer = Renderer(sentencepiece)
    ids, mask = renderer.render_sample(messages)
    assert list(ids) == whole
    assert learnt(renderer, ids, mask) == ["cd</s>", "gh</s>"]
    prompt = renderer.render_prompt(messages[:1])
    answered = (*prompt, *sentencepiece.convert_tokens_to_ids(["c", "d", "</s>"]))
    assert [*answered, *renderer.render_continuation(answered, messages[2:3])] == whole[:-3]
    sentencepiece.chat_template = None
    plain, _ = Renderer(sentencepiece).render_sample(messages[:2])
    assert sentencepiece.convert_ids_to_tokens(plain) == ["\u2581", "a", "b", "c", "d", "</s>"]


TOOLS = CHATML.replace("{% for message", "{% if tools %}{{ tools | tojson }}{% endif %}{% for message", 1)


def test_tools_are_rendered_by_templates_that_have_them(make_tokenizer):
    tools = [{"name": "add", "parameters": {"x": "int"}}]
    shown, plain = Renderer(make_tokenizer(TOOLS)), Renderer(make_tokenizer(CHATML))
    assert shown.decode(shown.render_prompt([user("hi")], tools)).startswith('[{"name": "add", "parameters"')
    assert shown.renders_tools([user("hi"), assistant("yes")], tools)
    assert not plain.renders_tools([user("hi")], tools)
    assert not Renderer(make_tokenizer()).renders_tools([user("hi")], tools)


def test_without_a_template_the_tokenizers_own_first_token_is_kept(make_tokenizer):
    tokenizer = make_tokenizer()
    tokenizer.add_bos_token = tokenizer.add_eos_token = True
    renderer = Renderer(tokenizer)
    assert tokenizer("")["input_ids"] == [tokenizer.bos_token_id, tokenizer.eos_token_id]
    ids, mask = renderer.render_sample([user("5 ="), assistant("5")])
    assert ids[0] == tokenizer.bos_token_id
    assert (ids.count(tokenizer.bos_token_id), ids.count(tokenizer.eos_token_id)) == (1, 1)
    assert mask[0] == 0
    assert renderer.render_prompt([user("5 =")])[0] == tokenizer.bos_token_id


def test_a_template_given_as_text_or_file_replaces_the_tokenizers(make_tokenizer, tmp_path):
    (tmp_path / "chat.jinja").write_text(LLAMA)
    tokenizer = make_tokenizer(CHATML)
    by_file = Renderer(tokenizer, str(tmp_path / "chat.jinja")).render_prompt(CONVERSATION[:1])
    assert by_file == Renderer(tokenizer, LLAMA).render_prompt(CONVERSATION[:1])
    assert by_file == Renderer(make_tokenizer(LLAMA)).render_prompt(CONVERSATION[:1])
    assert tokenizer.chat_template == CHATML
    with pytest.raises(RenderingError, match=r"chat_template: no file chat\.jinja"):
        Renderer(tokenizer, "chat.jinja")


def test_end_token_ids(make_tokenizer):
    tokenizer = make_tokenizer(GEMMA)
    assert Renderer(tokenizer).end_token_ids == {
        tokenizer.convert_tokens_to_ids("<end_of_turn>"),
        tokenizer.convert_tokens_to_ids("<eos>"),
    }


def test_decode_leaves_out_special_tokens(make_tokenizer):
    tokenizer = make_tokenizer(CHATML)
    ids = tokenizer("It is 4 .<|im_end|>", add_special_tokens=False)["input_ids"]
    assert Renderer(tokenizer).decode(ids) == "It is 4 ."
    assert Renderer(tokenizer).decode(ids, keep_special=True) == "It is 4 .<|im_end|>"


def test_a_template_without_an_end_token_can_prompt_but_not_teach(make_tokenizer):
    bare = (
        "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    renderer = Renderer(make_tokenizer(bare))
    assert renderer.decode(renderer.render_prompt([user("hi")])) == "user: hi\nassistant: "
    assert renderer.end_token_ids == {renderer.tokenizer.eos_token_id}
    with pytest.raises(RenderingError, match="could not learn to stop"):
        renderer.render_sample(CONVERSATION)
    with pytest.raises(RenderingError, match="no end token between an answer and the roles user"):
        renderer.render_continuation([5, 6], [user("hi")])


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "no messages"),
        ([user("hi"), assistant("ho")], "nothing to answer"),
        ([{"role": "system", "content": "be brief"}, user("hi")], "cannot render the roles system, user: role system"),
    ],
)
def test_messages_that_cannot_be_rendered_are_a_clear_error(make_tokenizer, messages, said):
    with pytest.raises(RenderingError, match=said):
        Renderer(make_tokenizer(GEMMA)).render_prompt(messages)


def test_a_sample_without_an_answer_is_a_clear_error(make_tokenizer):
    with pytest.raises(RenderingError, match="no answer of the assistant"):
        Renderer(make_tokenizer(CHATML)).render_sample([user("hi")])
    with pytest.raises(RenderingError, match=r"chat_options .* no chat template"):
        Renderer(make_tokenizer(), chat_options={"enable_thinking": False})
    with pytest.raises(RenderingError, match="content should be text"):
        Renderer(make_tokenizer()).render_prompt([{"role": "user", "content": [{"type": "text"}]}])
