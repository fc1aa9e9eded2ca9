"""Checks of what the caller hands to the statistics."""

import torch
from torch import Tensor


def check_targets(targets_T: Tensor, tokens: int, vocab_size: int, device: torch.device) -> None:
    """Refuse targets that cannot be the ids of ``tokens`` tokens.

    Raises:
        ValueError: Wrong shape, dtype or device, or an id at or above ``vocab_size``. On a GPU the
            last is a device-side assertion instead, which needs no synchronisation.
    """
    if targets_T.shape != (tokens,) or targets_T.dtype != torch.int64:
        raise ValueError(
            f"targets must be [{tokens}] int64, one id a row of the logits, got "
            f"{list(targets_T.shape)} {targets_T.dtype}. Flatten logits and targets alike."
        )
    if targets_T.device != device:
        raise ValueError(f"targets are on {targets_T.device}, the logits on {device}.")
    too_large_T = targets_T >= vocab_size
    _require(
        ~too_large_T.any(),
        lambda: (
            f"target {int(targets_T[too_large_T][0])} at row {int(too_large_T.nonzero()[0])} is "
            f"outside the vocabulary of {vocab_size} ids: it has no probability. Labels to be "
            "ignored must be negative; else tokenizer and model disagree on the vocabulary."
        ),
        f"a target id is >= vocab_size={vocab_size}",
    )


def inverse_temperature(temperature: float | Tensor, tokens: int, device: torch.device) -> Tensor:
    """[T] float64 1 / temperature from one temperature or one a token.

    Raises:
        ValueError: Not positive, or of another shape than [T].
    """
    if isinstance(temperature, Tensor):
        if temperature.shape != (tokens,):
            raise ValueError(
                f"temperature must be a float or [{tokens}], got {list(temperature.shape)}."
            )
        positive = (temperature > 0) & temperature.isfinite()
        _require(
            positive.all(),
            lambda: (
                f"temperature {float(temperature[~positive][0])} at row "
                f"{int((~positive).nonzero()[0])}: softmax(logits / temperature) needs a positive "
                "one. For greedy sampling state the temperature the policy is trained at."
            ),
            "a temperature is not positive",
        )
        return 1.0 / temperature.to(device=device, dtype=torch.float64)
    if not 0.0 < temperature < float("inf"):
        raise ValueError(
            f"temperature must be positive, got {temperature}: softmax(logits / temperature) is "
            "not defined. For greedy sampling state the temperature the policy is trained at."
        )
    return torch.full((tokens,), 1.0 / temperature, dtype=torch.float64, device=device)


def check_rows(name: str, rows_TX: Tensor) -> None:
    """Refuse rows that are not [T, X], contiguous and of a float dtype.

    Raises:
        ValueError: One of these.
    """
    if rows_TX.ndim != 2 or not rows_TX.is_floating_point():
        raise ValueError(
            f"{name} must be a [T, n] float tensor, got {list(rows_TX.shape)} {rows_TX.dtype}. "
            f"Flatten the leading dimensions with .view(-1, {name}.shape[-1])."
        )
    if not rows_TX.is_contiguous():
        raise ValueError(
            f"{name} {list(rows_TX.shape)} has strides {rows_TX.stride()}: a copy of it would cost "
            "the memory this op saves, and a gradient in its layout is not reduced correctly by "
            "every consumer. Select or transpose rows before the LM head."
        )


def _require(condition: Tensor, describe, short: str) -> None:
    """Raise `ValueError` unless ``condition``; on a GPU assert on the device."""
    if condition.device.type == "cpu":
        if not bool(condition):
            raise ValueError(describe())
    else:
        torch._assert_async(condition, short)
