"""A stream of Hugging Face tensors into a transformers model, each parameter exactly once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from dynamo_megatron.rollout.errors import RolloutError

SHOWN = 5


@torch.no_grad()
def copy_weights(model: PreTrainedModel, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copy every tensor of the stream into the parameter of its name.

    A tied output layer is one parameter with two names: its second name may be absent, and where it
    is present it must hold the same numbers.

    Args:
        model: its parameters are overwritten in place, converted to their dtype and device.
        weights: names and full tensors; consumed to its end even after an error, because other
            ranks take part in making it.

    Raises:
        RolloutError: a tensor is unknown, repeated, of another shape, missing, or contradicts the
            tie; names all of them. The model is then partly overwritten.
    """
    parameters = dict(model.named_parameters())
    tied = _tied_names(model, parameters)
    done: set[str] = set()
    copies: list[tuple[str, Tensor]] = []
    unknown, repeated, misshapen = [], [], []
    for name, tensor in weights:
        target = parameters.get(name, parameters.get(tied.get(name, "")))
        if target is None:
            unknown.append(name)
        elif name in done:
            repeated.append(name)
        elif target.shape != tensor.shape:
            misshapen.append(f"{name} {tuple(tensor.shape)} for {tuple(target.shape)}")
        elif name in tied:
            copies.append((name, tensor))
        else:
            target.copy_(tensor)
        done.add(name)
    untied = [name for name, tensor in copies if not _equals(parameters[tied[name]], tensor)]
    missing = [name for name in parameters if name not in done]
    faults = {
        "missing": missing,
        "unknown to the model": unknown,
        "sent twice": repeated,
        "of another shape": misshapen,
        "different from the embedding they are tied to": untied,
    }
    said = [f"{len(names)} {kind}: {_listed(names)}" for kind, names in faults.items() if names]
    if said:
        raise RolloutError(
            f"the weights do not fit the {model.config.model_type} that samples. "
            f"{'; '.join(said)}. The exporter must give the names and shapes of the model folder: "
            "check that both come from the same config.json."
        )


def _tied_names(model: PreTrainedModel, parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Second names of parameters that have two, with the first."""
    first = {id(parameter): name for name, parameter in parameters.items()}
    return {
        name: first[id(parameter)]
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if name not in parameters
    }


def _equals(parameter: Tensor, tensor: Tensor) -> bool:
    return torch.equal(parameter, tensor.to(parameter.device, parameter.dtype))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
