"""Problems become prompts: tokenised once, and the same ids for every engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from dynamo_megatron.data.problems import DataError, Problem
from dynamo_megatron.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# How the two callers of this package name these.
_TEMPLATE = "data.template of a run, --template of eval"
_LIMIT = "data.max_prompt_tokens of a run, --max-prompt-tokens of eval"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizedPrompts:
    """Prompts of a run.

    Attributes:
        prompts: in the order of the problems.
        dropped_overlong: problems left out because their prompt was too long.
    """

    prompts: tuple[Prompt, ...]
    dropped_overlong: int


def tokenize_prompts(
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    *,
    template: Literal["chat", "raw"],
    max_prompt_tokens: int,
) -> TokenizedPrompts:
    """Tokenise every problem and leave out those that are too long.

    Args:
        problems: at least one.
        tokenizer: of the model.
        template: ``chat`` puts the text into the tokenizer's chat template as a user's message
            (after the problem's system message), followed by the start of the assistant's; ``raw``
            encodes the text as it stands, with the special tokens that the tokenizer itself adds (a
            beginning-of-sequence token, where the model was trained with one).
        max_prompt_tokens: longest prompt kept.

    Raises:
        DataError: the tokenizer has no chat template, a prompt is empty or ends the sequence, or
            none is left.
    """
    if not problems:
        raise DataError("there is no problem to make a prompt of: name a source of problems.")
    encode = _encode_chat if template == "chat" else _encode_raw
    token_ids = encode(problems, tokenizer)
    prompts = tuple(
        Prompt(
            id=problem.id,
            text=problem.text,
            token_ids=tuple(ids),
            answer=problem.answer,
            source=problem.source,
        )
        for problem, ids in zip(problems, token_ids, strict=True)
        if len(ids) <= max_prompt_tokens
    )
    if not prompts:
        shortest = min(len(ids) for ids in token_ids)
        raise DataError(
            f"all {len(problems)} prompts are longer than {max_prompt_tokens} tokens; the shortest "
            f"has {shortest}. Raise the limit ({_LIMIT})."
        )
    for prompt in prompts:
        if not prompt.token_ids:
            raise DataError(
                f"the prompt of problem {prompt.text[:80]!r} has no token with the template "
                f"{template}: the model would have nothing to continue. Remove the problem."
            )
    return TokenizedPrompts(prompts=prompts, dropped_overlong=len(problems) - len(prompts))


def _encode_chat(
    problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase
) -> list[list[int]]:
    if tokenizer.chat_template is None:
        raise DataError(
            f"the chat template is asked for ({_TEMPLATE}), but the tokenizer has none, like those "
            "of base models. Set it to raw, or add a chat_template to the model folder."
        )
    conversations = [
        [
            *([{"role": "system", "content": problem.system}] if problem.system else []),
            {"role": "user", "content": problem.text},
        ]
        for problem in problems
    ]
    # The default of transformers 5 is a dictionary; its length is its number of keys.
    encoded: Any = tokenizer.apply_chat_template(
        conversations, add_generation_prompt=True, tokenize=True, return_dict=True
    )
    return encoded["input_ids"]


def _encode_raw(problems: Sequence[Problem], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    texts = [problem.text for problem in problems]
    with_system = [problem.text for problem in problems if problem.system]
    if with_system:
        raise DataError(
            f"{len(with_system)} of {len(problems)} problems, such as {with_system[0][:80]!r}, "
            "have a system message, for which raw text has no place. Choose the chat template "
            f"({_TEMPLATE})."
        )
    token_ids = tokenizer(texts)["input_ids"]
    ended = [
        text
        for text, ids in zip(texts, token_ids, strict=True)
        if ids and ids[-1] == tokenizer.eos_token_id
    ]
    if ended:
        raise DataError(
            f"{len(ended)} of {len(texts)} prompts, such as {ended[0][:80]!r}, end with the "
            f"end-of-sequence token {tokenizer.eos_token!r}: the model would answer what is over. "
            "Switch off the tokenizer's add_eos_token (or its post-processor), or choose the chat "
            f"template ({_TEMPLATE})."
        )
    return token_ids
