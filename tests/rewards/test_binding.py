"""Reward functions of other signatures are called rightly or refused, never with an argument in another's place."""

import functools

import pytest

from hone.rewards.binding import CannotBind, Case, bind

ROW = {"data_source": "gsm8k", "extra_info": {"index": 3}, "level": 2}
CASE = Case("an answer", "solver", "42", ROW)
FIRST = ("an answer", "42", ROW)


def hone_s(response, ground_truth, row, scale=1.0):
    return response, ground_truth, row, scale


def by_position(text, truth, case):
    return text, truth, case


def verl_s(data_source, solution_str, ground_truth, extra_info=None):
    return data_source, solution_str, ground_truth, extra_info


def swapped(ground_truth, response):
    return ground_truth, response


def response_only(response):
    return response


def the_rest(response, **kwargs):
    return response, kwargs


def anything(*args, **kwargs):
    return args, kwargs


def keyword_only(*, response, ground_truth=None):
    return response, ground_truth


def with_option(response, threshold):
    return response, threshold


def of_a_role(role, response):
    return role, response


def hone_s_of_a_role(response, ground_truth, row, scale, role="nobody"):
    return response, ground_truth, row, scale, role


def by_position_of_a_role(text, truth, case, role):
    return text, truth, case, role


def all_roles(responses, roles):
    return responses, roles


@pytest.mark.parametrize(
    ("function", "options", "returned", "needs"),
    [
        (hone_s, {"scale": 2.0}, ("an answer", "42", ROW, 2.0), True),
        (by_position, {}, FIRST, False),
        (verl_s, {}, ("gsm8k", "an answer", "42", {"index": 3}), True),
        (swapped, {}, ("42", "an answer"), True),
        (response_only, {}, "an answer", False),
        (the_rest, {}, ("an answer", {"ground_truth": "42", "row": ROW}), False),
        (anything, {"a": 1}, (FIRST, {"a": 1}), False),
        (keyword_only, {}, ("an answer", "42"), False),
        (with_option, {"threshold": 3}, ("an answer", 3), False),
        (functools.partial(verl_s, "mine"), {}, None, True),
        (of_a_role, {}, ("solver", "an answer"), False),
        (of_a_role, {"role": "mine"}, ("mine", "an answer"), False),
        (hone_s_of_a_role, {"scale": 2.0}, (*FIRST, 2.0, "solver"), True),
        (hone_s_of_a_role, {"scale": 2.0, "role": "mine"}, (*FIRST, 2.0, "mine"), True),
        (by_position_of_a_role, {}, (*FIRST, "solver"), False),
        (all_roles, {}, ("an answer", "solver"), False),
    ],
)
def test_arguments_are_found_by_name_or_position(function, options, returned, needs):
    binding = bind(function, options)
    assert binding.needs_ground_truth is needs
    if returned is not None:
        assert binding.call(function, CASE, options) == returned


def trl_s(completions, **columns):
    return completions, columns


def trl_with_columns(prompts, completions, answer, scale=1.0):
    return prompts, completions, answer, scale


TEXTS = Case(["a", "b"], "", 42, {"prompt": "q", "answer": 7, "level": [1]})
MESSAGES = Case(["a"], "", 42, {"messages": [{"role": "user", "content": "q"}], "answer": 7})


@pytest.mark.parametrize(
    ("function", "case", "options", "returned"),
    [
        (trl_with_columns, TEXTS, {}, (["q", "q"], ["a", "b"], [7, 7], 1.0)),
        (trl_with_columns, TEXTS, {"scale": 2.0, "answer": 8}, (["q", "q"], ["a", "b"], 8, 2.0)),
        (
            trl_s,
            TEXTS,
            {},
            (["a", "b"], {"prompt": ["q"] * 2, "answer": [7, 7], "level": [[1]] * 2, "ground_truth": [42] * 2}),
        ),
        (
            trl_with_columns,
            MESSAGES,
            {},
            ([MESSAGES.row["messages"]], [[{"role": "assistant", "content": "a"}]], [7], 1.0),
        ),
    ],
)
def test_a_function_of_trl_gets_lists_for_a_group_in_the_format_of_the_prompt(function, case, options, returned):
    binding = bind(function, options)
    assert binding.whole_group
    assert binding.call(function, case, options) == returned


def test_a_column_that_a_function_of_trl_wants_and_the_row_lacks_is_named():
    with pytest.raises(CannotBind, match="cannot fill its parameter 'answer': the row has the columns prompt, ground"):
        bind(trl_with_columns, {}).call(trl_with_columns, Case(["a"], "", None, {"prompt": "q"}), {})


def trl_with_ids(completions, completion_ids):
    return []


def batched(samples):
    return []


def one_more(data_source, solution_str, ground_truth, extra_info, tokenizer):
    return 0.0


def two_of_its_own(text, truth):
    return 0.0


def roles_of_one(response, roles):
    return 0.0


def role_of_all(responses, role):
    return 0.0


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (trl_with_ids, {}, "'completion_ids' comes from TRL's trainer; give it a default"),
        (batched, {}, "'samples' is a list of answers"),
        (one_more, {}, "cannot fill its parameter 'tokenizer' \\(it can: response, solution_str, ground_truth"),
        (roles_of_one, {}, "cannot fill its parameter 'roles' \\(it can: response, .*, role\\)"),
        (role_of_all, {}, "names 'responses', .* and 'role', which is of one; name 'roles', the list of all"),
        (
            two_of_its_own,
            {},
            "cannot be called as .*: it takes \\(.*, .*\\), .* write for example \\(response, ground_truth\\)",
        ),
        (verl_s, {"scale": 2.0}, "unexpected keyword argument 'scale' \\(it accepts the options: none"),
        (hone_s, {"scal": 2.0}, "unexpected keyword argument 'scal' \\(it accepts the options: scale"),
    ],
)
def test_what_cannot_be_called_is_refused(function, options, message):
    with pytest.raises(CannotBind, match=message):
        bind(function, options)
