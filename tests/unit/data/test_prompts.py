"""Prompts are tokenised once, by the model's own rules; what does not fit is counted."""

import pytest

from dynamo_megatron.data.problems import DataError, Problem
from dynamo_megatron.data.prompts import tokenize_prompts
from dynamo_megatron.types import Prompt

from .conftest import make_tokenizer

SHORT = Problem(text="Compute 1 + 2", answer="3", source="s")
LONG = Problem(text="Compute 1 + 2 + 2", answer="5", source="s")


def tokenize(problems, tokenizer, template, limit=100):
    return tokenize_prompts(problems, tokenizer, template=template, max_prompt_tokens=limit)


def test_chat_puts_the_text_into_the_models_template():
    result = tokenize([SHORT, LONG], make_tokenizer(chat=True, bos=True), "chat")
    # [U] Compute 1 + 2 [A], and no <s>: the template decides about it.
    assert result.prompts == (
        Prompt(id=SHORT.id, text=SHORT.text, token_ids=(2, 4, 5, 7, 6, 3), answer="3", source="s"),
        Prompt(
            id=LONG.id, text=LONG.text, token_ids=(2, 4, 5, 7, 6, 7, 6, 3), answer="5", source="s"
        ),
    )
    assert result.dropped_overlong == 0


@pytest.mark.parametrize(("bos", "ids"), [(False, (4, 5, 7, 6)), (True, (0, 4, 5, 7, 6))])
def test_raw_encodes_the_text_as_the_tokenizer_does(bos, ids):
    result = tokenize([SHORT], make_tokenizer(chat=True, bos=bos), "raw")
    assert [p.token_ids for p in result.prompts] == [ids]


def test_chat_without_a_template_says_what_to_set():
    with pytest.raises(
        DataError, match=r"\(data\.template of a run, --template of eval\).*Set it to raw"
    ):
        tokenize([SHORT], make_tokenizer(chat=False), "chat")


def test_a_prompt_that_ends_the_sequence_is_refused():
    with pytest.raises(DataError, match=r"1 of 1 prompts.*end-of-sequence token '</s>'"):
        tokenize([SHORT], make_tokenizer(chat=False, eos=True), "raw")


@pytest.mark.parametrize(("limit", "kept", "dropped"), [(4, 1, 1), (5, 1, 1), (6, 2, 0)])
def test_prompts_over_the_limit_are_dropped_and_counted(limit, kept, dropped):
    result = tokenize([LONG, SHORT], make_tokenizer(chat=False), "raw", limit)
    assert (len(result.prompts), result.dropped_overlong) == (kept, dropped)
    assert all(len(p.token_ids) <= limit for p in result.prompts)


def test_nothing_left_is_an_error_with_the_numbers():
    with pytest.raises(DataError, match=r"all 2 prompts.*longer than 3 tokens.*shortest has 4"):
        tokenize([SHORT, LONG], make_tokenizer(chat=False), "raw", 3)
    with pytest.raises(DataError, match="no problem"):
        tokenize([], make_tokenizer(chat=False), "raw")


def test_a_prompt_without_a_token_is_refused():
    blank = Problem(text=" ", answer="3", source="s")
    with pytest.raises(DataError, match="has no token"):
        tokenize([SHORT, blank], make_tokenizer(chat=False), "raw")
