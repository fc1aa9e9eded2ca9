"""Are a Hugging Face folder and a checkpoint the same model? Bit by bit, and by their logits.

Bits show that nothing was lost, doubled or cut wrongly; they are compared through the mapping that
the conversion used. Logits show that the mapping itself, and config.json, mean the same model to
transformers as to Megatron-Core: they know nothing of the mapping's fusing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from dynamo_megatron.convert.dtypes import name_of
from dynamo_megatron.convert.errors import ConversionError
from dynamo_megatron.convert.probe import HfLayers, MegatronLayers, probe_tokens, single_process
from dynamo_megatron.convert.reading import CheckpointWeights
from dynamo_megatron.hf.architecture import Architecture
from dynamo_megatron.hf.mapping import Entry, fuse, hf_shapes, parameter_table
from dynamo_megatron.hf.reader import SafetensorsReader

TOLERANCE = 1e-4
"""Largest difference of logits, in units of the largest logit.

Float32 of 40 layers differs by 1e-6 to 1e-5 between the two implementations; a wrong mapping by 1.
"""

_VOCAB_ROWS = 16_384
_TIED_HEAD = "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """A check that passed.

    Attributes:
        num_tensors: Hugging Face tensors that were compared.
        max_logit_difference: between transformers and Megatron-Core, over the probe batch.
        max_logit: largest absolute logit.
    """

    num_tensors: int
    max_logit_difference: float
    max_logit: float


def require_hf(reader: SafetensorsReader, arch: Architecture) -> None:
    """Refuse a folder whose tensors are not those of its config.json, by names and shapes.

    A tied model may hold its output layer a second time, if it is the same.

    Raises:
        ConversionError: names the tensors.
    """
    wanted, found = hf_shapes(arch), reader.names()
    if arch.tied and _TIED_HEAD in found:
        found = found - {_TIED_HEAD}
        _require_tied(reader)
    wrong = [
        f"{name} {reader.shape(name)} for {shape}"
        for name, shape in wanted.items()
        if name in found and reader.shape(name) != shape
    ]
    missing, surplus = sorted(wanted.keys() - found), sorted(found - wanted.keys())
    if wrong or missing or surplus:
        raise ConversionError(
            f"the weights of {reader.model_dir} do not belong to its config.json. Missing tensors: "
            f"{missing or 'none'}; beyond the model: {surplus or 'none'}; of another shape: "
            f"{wrong or 'none'}."
        )


def _require_tied(reader: SafetensorsReader) -> None:
    embedding = reader.tensor("model.embed_tokens.weight")
    if not torch.equal(reader.tensor(_TIED_HEAD), embedding):
        raise ConversionError(
            f"config.json of {reader.model_dir} ties the output layer to the embedding, and its "
            f"{_TIED_HEAD} holds other numbers: set tie_word_embeddings to what the model was "
            "trained with."
        )


@torch.no_grad()
def check_pair(
    model_dir: Path,
    weights: CheckpointWeights,
    arch: Architecture,
    *,
    written: Literal["hf", "megatron"],
    progress: Callable[[Iterable], Iterator] = iter,
) -> CheckReport:
    """Compare a Hugging Face folder with a checkpoint.

    One layer of each is in memory at a time, in float32 for the logits.

    Args:
        model_dir: the folder; its config.json has been read as ``arch``.
        weights: the checkpoint.
        arch: the model.
        written: which of the two came out of the conversion: it holds the other one's numbers,
            rounded to its own dtype.
        progress: wraps the iteration over layers.

    Raises:
        ConversionError: they are not the same model; says where they differ first.
    """
    weights.require(arch)
    tokens_T, positions_T = probe_tokens(arch)
    with SafetensorsReader(model_dir) as reader, single_process() as topology:
        require_hf(reader, arch)
        pair = _Pair(reader, weights, arch, written)
        theirs = HfLayers(model_dir, positions_T)
        ours = MegatronLayers(arch, topology, positions_T)
        embedding, *layers, norm, head = _stages(arch)
        hf, megatron = pair.read(embedding[0])
        hf_TH, megatron_TH = hf[0][tokens_T].float(), megatron[tokens_T].float()
        del hf, megatron
        for entries in progress(layers):
            hf_TH, megatron_TH = _through_layer(theirs, ours, pair, entries, hf_TH, megatron_TH)
            reader.forget()
        (hf_weight,), megatron_weight = pair.read(norm[0])
        hf_TH = theirs.norm(hf_TH, hf_weight)
        megatron_TH = ours.norm(megatron_TH, megatron_weight)
        (hf_weight,), megatron_weight = pair.read(head[0])
        logits = _compare_logits(hf_TH, hf_weight, megatron_TH, megatron_weight[: arch.vocab_size])
    logits.require_equal(model_dir)
    return CheckReport(
        num_tensors=pair.num_tensors,
        max_logit_difference=logits.difference,
        max_logit=logits.largest,
    )


def _through_layer(
    theirs: HfLayers,
    ours: MegatronLayers,
    pair: _Pair,
    entries: list[Entry],
    hf_TH: Tensor,
    megatron_TH: Tensor,
) -> tuple[Tensor, Tensor]:
    """Hidden states of both after one layer; its tensors are let go of."""
    tensors = {entry: pair.read(entry) for entry in entries}
    hf = {
        _inner(name, entry): part
        for entry, (parts, _) in tensors.items()
        for name, part in zip(entry.hf, parts, strict=True)
    }
    megatron = {
        tuple(_inner(name, entry) for name in entry.megatron): full
        for entry, (_, full) in tensors.items()
    }
    return theirs.layer(hf_TH, hf), ours.layer(megatron_TH, megatron)


def _stages(arch: Architecture) -> Iterator[list[Entry]]:
    """Embedding, each layer, final norm, output layer (where tied, the embedding again)."""
    table = list(parameter_table(arch))
    grouped = groupby(table, key=lambda e: (e.layer, "" if e.layer is not None else e.megatron))
    yield from (list(entries) for _, entries in grouped)
    if arch.tied:
        yield table[:1]


def _inner(name: str, entry: Entry) -> str:
    """A name without its ``model.layers.3.`` or ``decoder.layers.3.``."""
    return name.split(f"layers.{entry.layer}.", 1)[1]


class _Pair:
    """Reads an entry from both sides and compares its bits."""

    def __init__(
        self,
        reader: SafetensorsReader,
        weights: CheckpointWeights,
        arch: Architecture,
        written: Literal["hf", "megatron"],
    ) -> None:
        self._reader, self._weights, self._arch = reader, weights, arch
        self._written = written
        self._seen: set[str] = set()

    @property
    def num_tensors(self) -> int:
        return len(self._seen)

    def read(self, entry: Entry) -> tuple[list[Tensor], Tensor]:
        """Hugging Face parts and the Megatron tensor, both as the written side rounded them."""
        parts = [self._reader.tensor(name) for name in entry.hf]
        full = self._weights.tensor(entry)
        if self._written == "hf":
            full = full.to(parts[0].dtype)
        else:
            parts = [part.to(full.dtype) for part in parts]
        fused = fuse(entry.kind, parts, self._arch)
        # Rows that pad the vocabulary are no part of the model.
        if fused.dtype != full.dtype or not _same_bits(full[: fused.shape[0]], fused):
            raise ConversionError(
                f"{', '.join(entry.hf)} in {self._reader.model_dir} and {entry.megatron[-1]} in "
                f"{self._weights.folder} hold different numbers."
            )
        if not fused.isfinite().all():
            raise ConversionError(
                f"{', '.join(entry.hf)} of {self._reader.model_dir} holds NaN or infinite numbers "
                f"in {name_of(fused.dtype)}: the model computes nothing. If they are finite in the "
                "source, another --dtype holds them; otherwise the weights are damaged."
            )
        self._seen.update(entry.hf)
        return parts, full


def _same_bits(a: Tensor, b: Tensor) -> bool:
    # As integers, so that a NaN equals itself and -0.0 is not 0.0.
    kinds = {2: torch.int16, 4: torch.int32}
    kind = kinds[a.element_size()]
    return a.shape == b.shape and torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Logits:
    """Logits of both, over the probe batch.

    Attributes:
        difference: the largest between the two; NaN or infinite where one is.
        low: the smallest of transformers'.
        high: the largest of transformers'.
    """

    difference: float
    low: float
    high: float

    @property
    def largest(self) -> float:
        return max(abs(self.low), abs(self.high))

    def require_equal(self, model_dir: Path) -> None:
        if not all(map(math.isfinite, (self.difference, self.low, self.high))):
            raise ConversionError(
                f"the logits of {model_dir} are not finite in float32, so that nothing was checked "
                "by them: its weights are too large to compute with. They are damaged, or their "
                "scale is."
            )
        if not self.difference <= TOLERANCE * self.largest:
            raise ConversionError(
                f"transformers and Megatron-Core compute other logits from the same tensors: they "
                f"differ by {self.difference:.3g}, with logits up to {self.largest:.3g}. Something "
                f"in {model_dir}/config.json means another model to transformers than to this "
                "trainer."
            )
        if not self.high - self.low > TOLERANCE * self.largest:
            raise ConversionError(
                f"the outputs of {model_dir} carry no information: all logits of a probe batch "
                f"are {self.high:.3g}, so that nothing was checked by them. Its weights "
                "(such as the final norm) are zero, damaged, or too large to compute with."
            )


def _compare_logits(
    a_TH: Tensor, a_weight_VH: Tensor, b_TH: Tensor, b_weight_VH: Tensor
) -> _Logits:
    """Compare the logits of both, a piece of the vocabulary at a time."""
    found = []
    pieces = zip(a_weight_VH.split(_VOCAB_ROWS), b_weight_VH.split(_VOCAB_ROWS), strict=True)
    for a_weight, b_weight in pieces:
        logits = a_TH @ a_weight.float().T
        distance = (logits - b_TH @ b_weight.float().T).abs().max()
        found.append(torch.stack([distance, -logits.min(), logits.max()]))
    # Of a tensor: max() of Python would drop a NaN.
    difference, low, high = torch.stack(found).max(dim=0).values.tolist()
    return _Logits(difference=difference, low=-low, high=high)
