"""The policy network: Megatron-Core's GPTModel with a head that returns token statistics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    HAVE_TE,
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from dynamo_megatron.actor.attention import PackedDotProductAttention
from dynamo_megatron.actor.topology import Topology, TopologyError
from dynamo_megatron.hf.architecture import Architecture, padded_vocab_size
from dynamo_megatron.kernels import token_stats
from dynamo_megatron.kernels.linear import (
    LOGITS_BUDGET_BYTES,
    fused_head_pays,
    token_stats_linear,
)
from dynamo_megatron.types import TokenStats


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSettings:
    """What the head needs to know.

    Attributes:
        temperature: the policy is softmax(logits / temperature).
        vocab_size: true vocabulary; columns from here on are padding.
        variant: ``logits`` makes the logits of all loss rows and then their statistics; ``fused``
        makes them a chunk of tokens at a time and never holds them; ``auto`` decides for each
        micro-batch by ``kernels.linear.fused_head_pays``.
    logits_budget_bytes: bytes of one rank's logits from which ``auto`` takes ``fused``.
    """

    temperature: float
    vocab_size: int
    variant: Literal["auto", "logits", "fused"] = "auto"
    logits_budget_bytes: int = LOGITS_BUDGET_BYTES


class PolicyModel(GPTModel):
    """GPTModel whose last stage turns hidden states into statistics of the loss rows.

    ``forward(labels=targets_t, loss_mask=rows_t)`` on the last stage returns ``TokenStats`` of the
    t rows that predict a response token: the rows are picked *before* the output layer, so prompt
    and padding positions are never projected, and the logits of the picked rows never leave this
    class. Other stages return hidden states as GPTModel does.
    """

    def __init__(self, head: HeadSettings, *, tensor_group, **gpt_arguments) -> None:
        super().__init__(**gpt_arguments)
        self.head = head
        self.tensor_group = tensor_group
        if self.post_process:
            # The head gathers the sequence itself (it picks rows of the whole sequence), so the
            # output layer takes plain input and must sum its input gradient over the ranks.
            self.output_layer.sequence_parallel = False
            self.output_layer.allreduce_dgrad = tensor_group.size() > 1

    def _postprocess(
        self, hidden_states, input_ids, position_ids, labels, *_, loss_mask=None, **__
    ) -> Tensor | TokenStats:
        # GPTModel passes the other arguments on for inference and multi-token prediction.
        if not self.post_process:
            return hidden_states
        tied = self.share_embeddings_and_output_weights
        weight = self.shared_embedding_or_output_weight() if tied else self.output_layer.weight
        assert weight is not None and loss_mask is not None, "the last stage has both"
        if self._takes_fused(loss_mask.numel(), weight):
            return token_stats_linear(
                hidden_states.squeeze(1),
                weight,
                labels,
                rows_T=loss_mask,
                sequence_parallel=self.config.sequence_parallel,
                **self._statistics_arguments(),
            )
        if self.config.sequence_parallel:
            hidden_states = gather_from_sequence_parallel_region(
                hidden_states, tensor_parallel_output_grad=False, group=self.tensor_group
            )
        rows = hidden_states.squeeze(1).index_select(0, loss_mask)
        logits, _ = self.output_layer(rows.unsqueeze(1), weight=weight if tied else None)
        return token_stats(logits.squeeze(1), labels, **self._statistics_arguments())

    def _takes_fused(self, num_rows: int, weight: Tensor) -> bool:
        # Rows and columns are equal on all tensor ranks, so they decide alike.
        if self.head.variant != "auto":
            return self.head.variant == "fused"
        return fused_head_pays(
            num_rows,
            weight.shape[0],
            weight.element_size(),
            budget_bytes=self.head.logits_budget_bytes,
        )

    def _statistics_arguments(self) -> dict[str, Any]:
        return {
            "temperature": self.head.temperature,
            "vocab_size": self.head.vocab_size,
            "group": self.tensor_group,
            # The entropy is reported and modulates; it is never part of the loss.
            "entropy_grad": False,
        }


def check_divisible(arch: Architecture, *, tensor: int, pipeline: int) -> None:
    """Refuse a model that cannot be cut as asked. The vocabulary is padded instead.

    Raises:
        TopologyError: naming the number that does not divide.
    """
    for what, count, key, size in (
        ("attention heads", arch.num_heads, "tensor", tensor),
        ("key/value heads", arch.num_kv_heads, "tensor", tensor),
        ("MLP columns", arch.ffn_size, "tensor", tensor),
        ("layers", arch.num_layers, "pipeline", pipeline),
    ):
        if count % size:
            divisors = [d for d in range(1, count + 1) if count % d == 0 and d <= 64]
            raise TopologyError(
                f"parallel.{key}={size} does not divide the model's {count} {what}. Set "
                f"parallel.{key} to one of {divisors}."
            )


def transformer_config(
    arch: Architecture,
    topology: Topology,
    *,
    sequence_parallel: bool,
    dtype: torch.dtype,
    recompute: bool,
) -> TransformerConfig:
    """Megatron-Core's configuration of the model.

    ``calculate_per_token_loss`` is part of the loss normalisation stated in ``forward_step``.
    """
    engine = uses_transformer_engine()
    recompute_arguments = (
        {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
        if recompute
        else {}
    )
    return TransformerConfig(
        num_layers=arch.num_layers,
        hidden_size=arch.hidden_size,
        ffn_hidden_size=arch.ffn_size,
        num_attention_heads=arch.num_heads,
        num_query_groups=arch.num_kv_heads,
        kv_channels=arch.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=arch.norm_epsilon,
        qk_layernorm=arch.qk_norm,
        add_bias_linear=False,
        add_qkv_bias=arch.qkv_bias,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        tensor_model_parallel_size=topology.tensor_size,
        pipeline_model_parallel_size=topology.pipeline_size,
        sequence_parallel=sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        calculate_per_token_loss=True,
        # Every parameter comes from the model folder; the import checks that none is left out.
        perform_initialization=False,
        use_cpu_initialization=topology.device.type == "cpu",
        masked_softmax_fusion=False,
        persist_layer_norm=engine,
        apply_rope_fusion=engine,
        bias_activation_fusion=engine,
        bias_dropout_fusion=engine,
        gradient_accumulation_fusion=False,
        cuda_graph_scope=[],
        **recompute_arguments,
    )


def uses_transformer_engine() -> bool:
    """Transformer Engine's layers are taken where it is installed and there is a GPU for them."""
    return HAVE_TE and torch.cuda.is_available()


def layer_spec(arch: Architecture) -> ModuleSpec:
    """Transformer Engine's layers, or Megatron-Core's own with packed attention.

    Both take packed rows. Norms have other names in the two; ``hf.mapping`` knows both.
    """
    if uses_transformer_engine():
        return get_gpt_layer_with_transformer_engine_spec(qk_layernorm=arch.qk_norm)
    spec = get_gpt_layer_local_spec(qk_layernorm=arch.qk_norm, normalization="RMSNorm")
    attention = spec.submodules.self_attention  # type: ignore[union-attr]
    attention.submodules.core_attention = PackedDotProductAttention
    return spec


def build_model(
    arch: Architecture,
    topology: Topology,
    head: HeadSettings,
    *,
    sequence_parallel: bool = False,
    dtype: torch.dtype = torch.float32,
    recompute: bool = False,
    vocab_multiple: int = 128,
) -> PolicyModel:
    """This rank's part of the policy, with uninitialised parameters.

    Raises:
        TopologyError: heads, MLP or layers do not divide.
    """
    check_divisible(arch, tensor=topology.tensor_size, pipeline=topology.pipeline_size)
    config = transformer_config(
        arch, topology, sequence_parallel=sequence_parallel, dtype=dtype, recompute=recompute
    )
    return PolicyModel(
        head,
        tensor_group=topology.tensor_group,
        config=config,
        transformer_layer_spec=layer_spec(arch),
        vocab_size=padded_vocab_size(
            arch.vocab_size, multiple=vocab_multiple, tensor_parallel=topology.tensor_size
        ),
        max_sequence_length=arch.max_positions,
        pre_process=topology.first_stage,
        post_process=topology.last_stage,
        share_embeddings_and_output_weights=arch.tied,
        position_embedding_type="rope",
        rotary_base=arch.rope_theta,
        rope_scaling=arch.rope_factor is not None,
        rope_scaling_factor=arch.rope_factor or 1.0,
        parallel_output=True,
    ).to(topology.device)
