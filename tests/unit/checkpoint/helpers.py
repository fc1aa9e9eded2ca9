"""Policies that train a little, and everything about them that a resume must bring back."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from torch import Tensor

from dynamo_megatron.actor.forward_step import LossSettings
from dynamo_megatron.actor.policy import MegatronPolicy, PolicySettings
from dynamo_megatron.actor.topology import init_topology
from dynamo_megatron.checkpoint.manifest import model_fingerprint
from dynamo_megatron.checkpoint.megatron import MegatronCheckpointer
from dynamo_megatron.hf.architecture import read_architecture
from dynamo_megatron.types import TokenInputs, UpdateStats
from tests.policies import Layout, optimizer_settings, plan_for, random_batch

# Warm-up and decay, so that every update has another learning rate.
ADAM = {"name": "adam", "warmup_updates": 2, "decay_style": "cosine", "decay_updates": 9}


@contextmanager
def policy(
    model_dir: Path,
    layout: Layout | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    vocab_multiple: int = 8,
    seed: int = 1,
    temperature: float = 0.8,
    **optimizer,
):
    """A policy over the ranks of the current process group; its groups are destroyed afterwards."""
    layout = layout or Layout()
    topology = init_topology(tensor=layout.tensor, pipeline=layout.pipeline, seed=seed)
    assert topology.data_size == layout.data
    settings = PolicySettings(
        temperature=temperature,
        dtype=dtype,
        sequence_parallel=layout.sequence,
        recompute=False,
        vocab_multiple=vocab_multiple,
        loss=LossSettings(clip_low=0.2, clip_high=0.28, dual_clip=10.0),
        optimizer=optimizer_settings(**(ADAM | optimizer)),
    )
    try:
        yield MegatronPolicy(model_dir, read_architecture(model_dir), topology, settings)
    finally:
        parallel_state.destroy_model_parallel()


def checkpointer(
    policy: MegatronPolicy, directory: Path, *, keep: int = 5, hf_source: Path | None = None
) -> MegatronCheckpointer:
    fingerprint = model_fingerprint(policy.arch, policy.settings.dtype)
    return MegatronCheckpointer(
        directory, policy, keep=keep, fingerprint=fingerprint, hf_source=hf_source
    )


def train(policy: MegatronPolicy, steps: range) -> list[UpdateStats]:
    """One update a step, on another batch each step."""
    updates = []
    for step in steps:
        batch = random_batch(seed=step)
        plan = plan_for(policy, batch)
        noise = 0.3 * torch.randn(batch.advantages.shape, generator=torch.manual_seed(step))
        old = policy.token_stats(batch, plan).stats.logp + noise
        inputs = TokenInputs(advantages=batch.advantages, old_logp=old)
        updates.extend(policy.update(plan, inputs))
    return updates


def everything(policy: MegatronPolicy) -> dict[str, object]:
    """Weights, moments, update counts, numbers of the groups, schedule and random states."""
    tensors: dict[str, Tensor] = {
        name: p.detach().clone() for name, p in policy.module.named_parameters()
    }
    numbers: list[object] = [policy.scheduler.num_steps]
    for part in policy.optimizer.chained_optimizers:
        for number, group in enumerate(part.optimizer.param_groups):
            numbers.append({k: v for k, v in group.items() if k != "params"})
            for index, p in enumerate(group["params"]):
                tensors[f"main.{number}.{index}"] = p.detach().clone()
                for key, value in part.optimizer.state.get(p, {}).items():
                    tensors[f"{key}.{number}.{index}"] = torch.as_tensor(value).clone()
    tensors["rng"] = torch.get_rng_state()
    for name, state in get_cuda_rng_tracker().get_states().items():
        tensors[f"rng.{name}"] = state.clone()
    return {"tensors": tensors, "numbers": numbers}


def assert_same(got: dict, want: dict) -> None:
    """Every bit."""
    assert got["numbers"] == want["numbers"]
    assert got["tensors"].keys() == want["tensors"].keys()
    different = [
        name
        for name in want["tensors"]
        if not torch.equal(got["tensors"][name], want["tensors"][name])
    ]
    assert different == []
