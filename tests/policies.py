"""Small random Hugging Face models and batches, and policies built from them on any layout."""

from __future__ import annotations

import json
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from megatron.core import parallel_state
from torch import Tensor

from dynamo_megatron.actor.forward_step import LossSettings
from dynamo_megatron.actor.optimizer import OptimizerSettings
from dynamo_megatron.actor.policy import MegatronPolicy, PolicySettings
from dynamo_megatron.actor.topology import init_topology
from dynamo_megatron.batching.split import RowLimits, plan_mini_batches, row_multiple
from dynamo_megatron.config import ClipConfig, ModulationConfig
from dynamo_megatron.hf.architecture import read_architecture
from dynamo_megatron.stages.modulation import modulate_batch
from dynamo_megatron.types import MiniBatch, TokenInputs, TrainBatch, ragged_offsets

VOCAB = 101  # prime: no tensor-parallel size divides it, so padding is real


@dataclass(frozen=True)
class Layout:
    tensor: int = 1
    pipeline: int = 1
    sequence: bool = False
    data: int = 1

    @property
    def world_size(self) -> int:
        return self.tensor * self.pipeline * self.data


# What makes the families differ: Hugging Face's class, and its options beyond the common ones.
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
FAMILIES = {
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 8}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE, "rms_norm_eps": 1e-5}),
    "smollm2": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}}),
}


def write_model(
    folder: Path, family: str, *, tied: bool = False, seed: int = 0, dtype=torch.float32, **options
) -> Path:
    """A random model with sharp enough logits that entropies differ from token to token."""
    import transformers

    name, special = FAMILIES[family]
    values = {
        "vocab_size": VOCAB,
        "hidden_size": 32 if family == "qwen3" else 64,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 128,
        "tie_word_embeddings": tied,
        "rms_norm_eps": 1e-6,
        **special,
        **options,
    }
    torch.manual_seed(seed)
    config = getattr(transformers, f"{name}Config")(**values)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            norm = "norm" in parameter_name
            scale = 0.1 if norm else 8**0.5 / values["hidden_size"] ** 0.5 / 2
            parameter.copy_(scale * torch.randn_like(parameter) + norm)
    model.to(dtype).save_pretrained(folder)
    return folder


def write_qwen3(folder: Path, *, tied: bool = False, seed: int = 0) -> Path:
    """A random Qwen3."""
    return write_model(folder, "qwen3", tied=tied, seed=seed)


def random_batch(seed: int = 3) -> TrainBatch:
    """Four ragged groups of 1, 3, 2 and 2 sequences."""
    g = torch.Generator().manual_seed(seed)
    prompts, responses = [5, 9, 9, 9, 3, 3, 7, 7], [6, 2, 8, 4, 11, 1, 5, 9]
    rows = zip(prompts, responses, strict=True)
    sequences = [torch.randint(0, VOCAB, (p + r,), generator=g) for p, r in rows]
    num_tokens = sum(responses)
    per_sequence = torch.randn(len(prompts), generator=g)
    per_sequence[1] = 0.0
    return TrainBatch(
        tokens=torch.cat(sequences),
        token_offsets=ragged_offsets([len(s) for s in sequences]),
        prompt_lengths=torch.tensor(prompts),
        response_offsets=ragged_offsets(responses),
        group_index=torch.tensor([0, 1, 1, 1, 2, 2, 3, 3]),
        sampler_logp=torch.zeros(num_tokens),
        advantages=per_sequence.repeat_interleave(torch.tensor(responses)),
    )


def optimizer_settings(name: str = "sgd", **changes) -> OptimizerSettings:
    values = {
        "name": name,
        "lr": 0.05 if name == "sgd" else 1e-3,
        "min_lr": 0.0,
        "warmup_updates": 0,
        "decay_style": "constant",
        "decay_updates": 100,
        "weight_decay": 0.0 if name == "sgd" else 0.1,
        "beta1": 0.9,
        "beta2": 0.95,
        # Adam's first step is the sign of the gradient. With 1e-8 an entry whose gradient is
        # rounding noise would move by a whole step in either direction.
        "epsilon": 1e-6,
        "clip_grad": 0.0 if name == "sgd" else 1.0,
        "distributed": False,
    }
    return OptimizerSettings(**(values | changes))


@contextmanager
def policy_on(
    model_dir: Path,
    layout: Layout,
    *,
    optimizer: OptimizerSettings | None = None,
    temperature: float = 0.8,
    vocab_multiple: int = 4,
    kl_coefficient: float = 0.0,
    recompute: bool = False,
    head: str = "auto",
    dtype: torch.dtype = torch.float32,
):
    """A policy over the ranks of the current process group, its groups destroyed afterwards."""
    topology = init_topology(tensor=layout.tensor, pipeline=layout.pipeline, seed=1)
    assert topology.data_size == layout.data
    settings = PolicySettings(
        temperature=temperature,
        head=head,
        dtype=dtype,
        sequence_parallel=layout.sequence,
        recompute=recompute,
        vocab_multiple=vocab_multiple,
        loss=LossSettings(
            clip_low=0.2, clip_high=0.28, dual_clip=10.0, kl_coefficient=kl_coefficient
        ),
        optimizer=optimizer or optimizer_settings(),
    )
    try:
        yield MegatronPolicy(model_dir, read_architecture(model_dir), topology, settings)
    finally:
        parallel_state.destroy_model_parallel()


def plan_for(
    policy: MegatronPolicy,
    batch: TrainBatch,
    *,
    micro_batch_sequences: int | None = None,
    num_groups: int = 4,
    groups_per_mini_batch: int = 4,
    row_tokens: int = 64,
) -> tuple[MiniBatch, ...]:
    topology = policy.topology
    return plan_mini_batches(
        batch,
        num_groups=num_groups,
        groups_per_mini_batch=groups_per_mini_batch,
        data_parallel=topology.data_size,
        limits=RowLimits(
            tokens=row_tokens,
            sequences=micro_batch_sequences,
            multiple=row_multiple(
                tensor=topology.tensor_size, sequence_parallel=policy.settings.sequence_parallel
            ),
            equal_lengths=topology.pipeline_size > 1,
        ),
    )


def prepared(policy: MegatronPolicy, batch: TrainBatch, plan, *, dynamo: bool):
    """(token inputs, modulated batch, old statistics) of a step."""
    old = policy.token_stats(batch, plan)
    config = ModulationConfig(
        gradient_compensation=dynamo, stabilization=dynamo, tau=0.5, gamma=10.0
    )
    modulated = modulate_batch(
        batch, plan, old, config, ClipConfig(), group=policy.topology.world_group
    )
    inputs = TokenInputs(advantages=modulated.batch.advantages, old_logp=old.stats.logp)
    return inputs, modulated, old


@torch.no_grad()
def hf_gradients(policy: MegatronPolicy) -> dict[str, Tensor]:
    """Reduced gradients under Hugging Face names, through the export's own mapping."""
    parameters = list(policy.module.parameters())
    weights = [p.detach().clone() for p in parameters]
    for p in parameters:
        p.copy_(p.main_grad)
    gradients = {name: tensor.clone() for name, tensor in policy.weights()}
    for p, weight in zip(parameters, weights, strict=True):
        p.copy_(weight)
    return gradients


def hf_weights(policy: MegatronPolicy) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in policy.weights()}


def relative_distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """||a - b|| / ||b|| over all tensors together."""
    assert a.keys() == b.keys()
    difference = sum(float((a[k].double() - b[k].double()).square().sum()) for k in a)
    return (difference / sum(float(t.double().square().sum()) for t in b.values())) ** 0.5


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))
