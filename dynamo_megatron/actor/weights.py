"""Weights in from a Hugging Face folder, and out again under Hugging Face names."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from torch import Tensor, nn

from dynamo_megatron.actor.topology import Topology
from dynamo_megatron.hf.architecture import Architecture, padded_vocab_size
from dynamo_megatron.hf.mapping import (
    Entry,
    Kind,
    fuse,
    megatron_shape,
    parameter_table,
    shard,
    unfuse,
    unshard,
)
from dynamo_megatron.hf.reader import SafetensorsReader, WeightsError
from dynamo_megatron.parallel.tensors import broadcast_tensor, gather_shards


def stage_of(entry: Entry, arch: Architecture, pipeline_size: int) -> int:
    """The pipeline stage that owns a parameter (for a tied embedding: the first)."""
    if entry.layer is not None:
        return entry.layer // (arch.num_layers // pipeline_size)
    return 0 if entry.megatron[0].startswith("embedding.") else pipeline_size - 1


def _local_names(entry: Entry, arch: Architecture, topology: Topology) -> tuple[str, ...]:
    if entry.layer is None:
        return entry.megatron
    first = topology.pipeline_rank * (arch.num_layers // topology.pipeline_size)
    return tuple(
        name.replace(f"layers.{entry.layer}.", f"layers.{entry.layer - first}.", 1)
        for name in entry.megatron
    )


def local_parameter(
    parameters: dict[str, nn.Parameter], entry: Entry, arch: Architecture, topology: Topology
) -> nn.Parameter:
    """This stage's parameter for an entry that the stage owns."""
    for name in _local_names(entry, arch, topology):
        if name in parameters:
            return parameters[name]
    raise WeightsError(
        f"the model has no parameter {' or '.join(entry.megatron)}: the table in hf/mapping does "
        "not describe this layer spec. Add the name it uses to the entry's alternatives."
    )


@torch.no_grad()
def load_hf_weights(
    model: nn.Module, reader: SafetensorsReader, arch: Architecture, topology: Topology
) -> None:
    """Copy this rank's part of a Hugging Face model into ``model``, every parameter exactly once.

    Raises:
        WeightsError: a tensor is missing, left over, or has another shape than config.json says.
    """
    parameters = dict(model.named_parameters())
    expected: set[str] = set()
    loaded: set[int] = set()
    for entry in parameter_table(arch):
        expected.update(entry.hf)
        targets = []
        if stage_of(entry, arch, topology.pipeline_size) == topology.pipeline_rank:
            targets.append(local_parameter(parameters, entry, arch, topology))
        if _tied_copy(entry, arch, topology):
            # With a pipeline the last stage holds the tied matrix a second time.
            targets.append(parameters["output_layer.weight"])
        if targets:
            part = _read_shard(reader, entry, arch, topology, targets[0].shape)
        for target in targets:
            target.copy_(part.to(target.dtype))
            _mark_split(target, entry.kind)
            loaded.add(id(target))
    missed = [name for name, p in parameters.items() if id(p) not in loaded]
    surplus = reader.names() - expected - ({"lm_head.weight"} if arch.tied else set())
    if missed or surplus:
        raise WeightsError(
            f"{reader.model_dir}: parameters without a tensor: {missed or 'none'}; tensors without "
            f"a parameter: {sorted(surplus) or 'none'}. The weights do not belong to config.json."
        )


def _mark_split(parameter: nn.Parameter, kind: Kind) -> None:
    """Say that the tensor ranks hold different parts of this parameter.

    Megatron-Core says so only while it initialises weights, which is switched off here. Without the
    mark its gradient norm counts rank 0's part alone and takes the others for copies.
    """
    if kind is not Kind.COPY and not hasattr(parameter, "tensor_model_parallel"):
        dim = 1 if kind is Kind.INPUT_SPLIT else 0
        set_tensor_model_parallel_attributes(parameter, is_parallel=True, dim=dim, stride=1)


def _tied_copy(entry: Entry, arch: Architecture, topology: Topology) -> bool:
    return (
        arch.tied
        and entry.megatron[0].startswith("embedding.")
        and topology.pipeline_size > 1
        and topology.last_stage
    )


def _read_shard(
    reader: SafetensorsReader,
    entry: Entry,
    arch: Architecture,
    topology: Topology,
    shape: torch.Size,
) -> Tensor:
    parts = [reader.tensor(name) for name in entry.hf]
    size = topology.tensor_size
    try:
        part = shard(
            entry.kind,
            fuse(entry.kind, parts, arch),
            rank=topology.tensor_rank,
            size=size,
            padded_vocab=shape[0] * size,
        )
    except RuntimeError:
        part = None
    if part is None or part.shape != shape or _wrong_vocabulary(entry, parts, arch):
        raise WeightsError(
            f"{reader.model_dir}: {', '.join(entry.hf)} has shape "
            f"{', '.join(str(tuple(p.shape)) for p in parts)}, which does not give the "
            f"{tuple(shape)} of rank {topology.tensor_rank} of {size} that config.json asks for "
            f"(vocabulary {arch.vocab_size}). Weights and config.json are of different models."
        )
    return part


def _wrong_vocabulary(entry: Entry, parts: list[Tensor], arch: Architecture) -> bool:
    return entry.kind is Kind.VOCAB and parts[0].shape[0] != arch.vocab_size


@torch.no_grad()
def export_hf_weights(
    model: nn.Module, arch: Architecture, topology: Topology, *, vocab_multiple: int
) -> Iterator[tuple[str, Tensor]]:
    """Stream the whole model under Hugging Face names, one fused tensor in memory at a time.

    Tied models yield no ``lm_head.weight``. Padding rows of the vocabulary are trimmed.

    Yields:
        (name, tensor) in model order, on the parameters' device, equal on every rank.

    Collectives: for each entry one all-gather on the owner stage's tensor group and one broadcast
    on the pipeline group; every rank must exhaust the stream.
    """
    parameters = dict(model.named_parameters())
    dtype = next(iter(parameters.values())).dtype
    padded_vocab = padded_vocab_size(
        arch.vocab_size, multiple=vocab_multiple, tensor_parallel=topology.tensor_size
    )
    for entry in parameter_table(arch):
        owner = stage_of(entry, arch, topology.pipeline_size)
        if owner == topology.pipeline_rank:
            local = local_parameter(parameters, entry, arch, topology).detach()
            shards = (
                [local] if entry.kind is Kind.COPY else gather_shards(local, topology.tensor_group)
            )
            full = unshard(entry.kind, shards).clone()
        else:
            shape = megatron_shape(entry, arch, padded_vocab=padded_vocab)
            full = torch.empty(shape, dtype=dtype, device=topology.device)
        full = broadcast_tensor(full, source=owner, group=topology.pipeline_group)
        yield from zip(entry.hf, unfuse(entry.kind, full, arch), strict=True)
