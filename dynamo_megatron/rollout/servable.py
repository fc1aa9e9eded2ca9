"""What no engine can answer in full is refused before anything is sampled."""

from __future__ import annotations

from collections.abc import Sequence

from dynamo_megatron.rollout.errors import RolloutError
from dynamo_megatron.types import GroupSizes, Prompt


def require_servable(
    prompts: Sequence[Prompt],
    sizes: GroupSizes,
    temperature: float | None,
    *,
    max_tokens: int,
    limit: int,
) -> None:
    """Check a request for rollouts.

    Args:
        prompts: in the order of ``sizes.prompt_ids``.
        sizes: rollouts for each.
        temperature: above 0, or None for greedy decoding.
        max_tokens: longest response.
        limit: longest prompt and response together, tokens.

    Raises:
        RolloutError: prompts and sizes do not match, or a prompt is empty or too long.
    """
    ids = tuple(prompt.id for prompt in prompts)
    if ids != sizes.prompt_ids:
        raise RolloutError(
            f"{len(ids)} prompts and the sizes of {len(sizes.prompt_ids)} came, or in another "
            "order: rollouts would go to the wrong prompts. Pass the prompts in the order of "
            "sizes.prompt_ids."
        )
    if temperature is not None and temperature <= 0:
        raise RolloutError(
            f"temperature={temperature}: softmax(logits / temperature) needs it above 0. For "
            "greedy decoding pass None."
        )
    for prompt in prompts:
        length = len(prompt.token_ids)
        if not 1 <= length <= limit - max_tokens:
            raise RolloutError(
                f"prompt {prompt.id} has {length} tokens and its response may have "
                f"{max_tokens}, but it needs at least 1 and the model has {limit} "
                "positions. Lower rollout.max_tokens or data.max_prompt_tokens."
            )
