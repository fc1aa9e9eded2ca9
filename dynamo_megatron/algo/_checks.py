"""The one check that every per-element function shares."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def require_equal_shapes(tensors: Mapping[str, Tensor], *, ndim: int = 1) -> None:
    """Refuse tensors that would broadcast: [T, 1] beside [T] silently makes [T, T].

    Raises:
        ValueError: the shapes differ, or are not ``ndim``-dimensional.
    """
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    if len(set(shapes.values())) > 1 or any(len(shape) != ndim for shape in shapes.values()):
        found = ", ".join(f"{name} {list(shape)}" for name, shape in shapes.items())
        raise ValueError(
            f"these tensors must be {ndim}-dimensional and equally long, got {found}: element i of "
            "one belongs to element i of the others. Flatten and align them first."
        )
