"""One decoder layer at a time of a model in transformers, and of the same model in Megatron-Core.

Shapes: T probe tokens, H hidden size, D head dimension, V vocabulary.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from dynamo_megatron.actor.model import HeadSettings, build_model
from dynamo_megatron.actor.topology import Topology, init_topology
from dynamo_megatron.convert.errors import ConversionError
from dynamo_megatron.hf.architecture import Architecture

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_NUM_TOKENS = 32
# The last of them far apart: the slow rotary frequencies, and their scaling, hardly turn before.
_FAR_POSITIONS = (64, 128, 256, 512, 1024, 2048)


def probe_tokens(arch: Architecture) -> tuple[Tensor, Tensor]:
    """Token ids and positions [T]: the first and the last token of the vocabulary among them."""
    generator = torch.Generator().manual_seed(0)
    tokens_T = torch.randint(arch.vocab_size, (_NUM_TOKENS,), generator=generator)
    tokens_T[0], tokens_T[-1] = 0, arch.vocab_size - 1
    positions_T = torch.arange(_NUM_TOKENS)
    far = torch.tensor([p for p in _FAR_POSITIONS if p < arch.max_positions], dtype=torch.long)
    if len(far):
        positions_T[-len(far) :] = far
    return tokens_T, positions_T.clamp(max=arch.max_positions - 1)


@contextmanager
def single_process() -> Iterator[Topology]:
    """Megatron-Core's groups in a process of its own, over no network.

    Collectives: creates process groups of one.
    """
    from megatron.core import parallel_state

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_topology(tensor=1, pipeline=1, seed=0)
    finally:
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def one_layer_config(model_dir: Path) -> PretrainedConfig:
    """The configuration as transformers reads it, with a single layer.

    Raises:
        ConversionError: transformers does not read it.
    """
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model_dir)
    except Exception as error:  # its validation raises anything
        raise ConversionError(
            f"transformers cannot read {model_dir}/config.json ({type(error).__name__}: "
            f"{' '.join(str(error).split())}): correct the file, or copy it again."
        ) from None
    if config.get_text_config().num_hidden_layers > 1:
        config.num_hidden_layers = 1
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:1]
    return config


class HfLayers:
    """Modules of transformers' own model; parameters come and go with each layer."""

    def __init__(self, model_dir: Path, positions_T: Tensor) -> None:
        from transformers import AutoModelForCausalLM

        config = one_layer_config(model_dir)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        self._layer, self._norm = model.model.layers[0], model.model.norm
        # Made again, off the meta device: its frequencies are computed and not loaded.
        rotary = type(model.model.rotary_emb)(config=config)
        self._rotary = rotary(torch.zeros(1), positions_T[None])

    def layer(self, hidden_TH: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """Run one decoder layer.

        Args:
            hidden_TH: [T, H] float32.
            tensors: by name within the layer; exactly those that transformers wants.
        """
        _assign(self._layer, tensors)
        output = self._layer(hidden_TH[None], attention_mask=None, position_embeddings=self._rotary)
        return output[0]

    def norm(self, hidden_TH: Tensor, weight_H: Tensor) -> Tensor:
        """The norm before the output layer."""
        _assign(self._norm, {"weight": weight_H})
        return self._norm(hidden_TH)


def _assign(module: torch.nn.Module, tensors: Mapping[str, Tensor]) -> None:
    module.load_state_dict({name: t.float() for name, t in tensors.items()}, assign=True)


class MegatronLayers:
    """A Megatron-Core model of one layer, made as training makes it."""

    def __init__(self, arch: Architecture, topology: Topology, positions_T: Tensor) -> None:
        from megatron.core.packed_seq_params import PackedSeqParams

        one = replace(arch, num_layers=1, vocab_size=1)
        head = HeadSettings(temperature=1.0, vocab_size=1)
        model = build_model(one, topology, head, vocab_multiple=1).eval()
        norm = model.decoder.final_layernorm
        assert norm is not None, "the only stage has the final norm"
        self._layer, self._norm = model.decoder.layers[0], norm
        self._parameters = dict(self._layer.named_parameters())
        self._rotary = model.rotary_pos_emb(int(positions_T.max()) + 1)[positions_T]
        bounds = torch.tensor([0, len(positions_T)], dtype=torch.int32)
        self._packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=len(positions_T),
            max_seqlen_kv=len(positions_T),
        )

    def layer(self, hidden_TH: Tensor, tensors: Mapping[tuple[str, ...], Tensor]) -> Tensor:
        """Run one decoder layer.

        Args:
            hidden_TH: [T, H] float32.
            tensors: by names within the layer, alternatives of layer specs included; they must be
                all of its parameters.
        """
        loaded = set()
        for names, tensor in tensors.items():
            (name,) = [name for name in names if name in self._parameters]
            self._parameters[name].copy_(tensor)
            loaded.add(name)
        if missed := self._parameters.keys() - loaded:
            raise ConversionError(
                f"the mapping has no tensor for {sorted(missed)} of Megatron-Core's layer."
            )
        output, _ = self._layer(
            hidden_TH[:, None],
            attention_mask=None,
            rotary_pos_emb=self._rotary,
            packed_seq_params=self._packed,
        )
        return output[:, 0]

    def norm(self, hidden_TH: Tensor, weight_H: Tensor) -> Tensor:
        """The norm before the output layer."""
        self._norm.weight.copy_(weight_H)
        return self._norm(hidden_TH)
