"""Builds a run from its configuration: the only module that names concrete classes."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dynamo_megatron.actor.forward_step import LossSettings
from dynamo_megatron.actor.optimizer import OptimizerSettings
from dynamo_megatron.actor.policy import MegatronPolicy, PolicySettings
from dynamo_megatron.actor.topology import Topology
from dynamo_megatron.assets import model_folder
from dynamo_megatron.batching.split import RowLimits, row_multiple
from dynamo_megatron.checkpoint.errors import CheckpointError
from dynamo_megatron.checkpoint.manifest import MARKER, model_fingerprint
from dynamo_megatron.checkpoint.megatron import MegatronCheckpointer
from dynamo_megatron.config import Config
from dynamo_megatron.data.prompts import tokenize_prompts
from dynamo_megatron.data.shuffle import ShuffledPrompts
from dynamo_megatron.data.sources import load_problems
from dynamo_megatron.data.tokenizer import load_tokenizer, pad_token_id, stop_token_ids
from dynamo_megatron.hf.architecture import Architecture, read_architecture
from dynamo_megatron.loop import Parts
from dynamo_megatron.parallel.control import ControlPlane
from dynamo_megatron.protocols import RolloutEngine
from dynamo_megatron.recorder import Recorder
from dynamo_megatron.reward.pool import VERIFIERS, RewardPool
from dynamo_megatron.rollout.hf_engine import HfEngine
from dynamo_megatron.rollout.vllm.build import VllmSpec, build_vllm_engine
from dynamo_megatron.signals import StopSignal
from dynamo_megatron.stages.allocation import check_allocation
from dynamo_megatron.stages.heldout import HeldoutStage
from dynamo_megatron.stages.sampling import RolloutTier
from dynamo_megatron.state import LoopState
from dynamo_megatron.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a run reads: the same on every rank, checked before any model is built.

    Attributes:
        model_dir: Hugging Face folder of the starting policy.
        arch: its shape.
        tokenizer: its tokenizer.
        stop_ids: tokens that end a response.
        train_prompts: training prompts.
        train: the same in the order in which they are drawn.
        heldout: held-out prompts, disjoint from the training prompts.
    """

    model_dir: Path
    arch: Architecture
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    train_prompts: tuple[Prompt, ...]
    train: ShuffledPrompts
    heldout: tuple[Prompt, ...]


def read_inputs(config: Config) -> Inputs:
    """Read model shape, tokenizer and problems.

    Raises:
        ValueError: anything about them that cannot work, before hours are spent.
    """
    model_dir = model_folder(config.model.path)
    if (model_dir / MARKER).is_file():
        raise ValueError(
            f"model.path={config.model.path} is a Megatron checkpoint, which has no tokenizer and "
            "no Hugging Face weights. Set model.weights to it, and model.path to the Hugging Face "
            "folder of the same model."
        )
    tokenizer = load_tokenizer(model_dir)
    arch = read_architecture(model_dir)
    _check_lengths(config, arch)
    check_allocation(config.algorithm.allocation, config.data.prompts_per_step)
    train = _prompts(config, config.data.train, tokenizer, "training")
    heldout: tuple[Prompt, ...] = ()
    if config.data.heldout:
        heldout = _prompts(config, config.data.heldout, tokenizer, "held-out")
    _check_disjoint(train, heldout)
    if len(train) < config.data.prompts_per_step:
        raise ValueError(
            f"data.prompts_per_step={config.data.prompts_per_step}, but there are only "
            f"{len(train)} training prompts: a step's prompts must differ. Lower "
            "data.prompts_per_step or give data.train more problems."
        )
    return Inputs(
        model_dir=model_dir,
        arch=arch,
        tokenizer=tokenizer,
        stop_ids=stop_token_ids(tokenizer, model_dir),
        train_prompts=train,
        train=ShuffledPrompts(train, seed=config.run.seed),
        heldout=heldout,
    )


def _check_lengths(config: Config, arch: Architecture) -> None:
    longest = config.data.max_prompt_tokens + config.rollout.max_tokens
    if longest > arch.max_positions:
        raise ValueError(
            f"data.max_prompt_tokens + rollout.max_tokens = {longest}, but the model was made for "
            f"{arch.max_positions} positions. Lower one of the two."
        )


def _prompts(config: Config, sources, tokenizer, what: str) -> tuple[Prompt, ...]:
    loaded = load_problems(sources)
    tokenized = tokenize_prompts(
        loaded.problems,
        tokenizer,
        template=config.data.template,
        max_prompt_tokens=config.data.max_prompt_tokens,
    )
    logger.info(
        "%d %s prompts (%s); %d duplicates removed, %d longer than %d tokens dropped",
        len(tokenized.prompts),
        what,
        ", ".join(f"{name} {count}" for name, count in loaded.counts.items()),
        loaded.duplicates,
        tokenized.dropped_overlong,
        config.data.max_prompt_tokens,
    )
    return tokenized.prompts


def _check_disjoint(train: Sequence[Prompt], heldout: Sequence[Prompt]) -> None:
    train_texts, heldout_texts = (
        {" ".join(prompt.text.split()).casefold() for prompt in prompts}
        for prompts in (train, heldout)
    )
    shared = train_texts & heldout_texts
    if shared:
        raise ValueError(
            f"{len(shared)} held-out problems are training problems too, such as "
            f"{min(shared)[:80]!r}: pass@1 on them would measure memory. Remove them from "
            "data.heldout."
        )


def build_policy(config: Config, inputs: Inputs, topology: Topology) -> MegatronPolicy:
    """The policy on this rank, loaded from the model folder."""
    clip, kl, optimizer = config.algorithm.clip, config.algorithm.kl, config.optimizer
    updates = config.run.num_steps * num_mini_batches(config)
    settings = PolicySettings(
        temperature=config.rollout.temperature,
        head=config.model.head,
        logits_budget_bytes=config.model.logits_budget_mib << 20,
        dtype=DTYPES[config.model.dtype],
        sequence_parallel=config.parallel.sequence,
        recompute=config.model.recompute,
        vocab_multiple=config.parallel.vocab_multiple,
        loss=LossSettings(
            clip_low=clip.low,
            clip_high=clip.high,
            dual_clip=clip.dual,
            kl_coefficient=kl.coefficient,
            kl_estimator=kl.estimator,
        ),
        optimizer=OptimizerSettings(
            name=optimizer.name,
            lr=optimizer.lr,
            min_lr=optimizer.min_lr,
            warmup_updates=optimizer.warmup_updates,
            decay_style=optimizer.decay_style,
            decay_updates=optimizer.decay_updates or max(updates, 2),
            weight_decay=optimizer.weight_decay,
            beta1=optimizer.beta1,
            beta2=optimizer.beta2,
            epsilon=optimizer.epsilon,
            clip_grad=optimizer.clip_grad,
            distributed=optimizer.distributed,
        ),
    )
    return MegatronPolicy(inputs.model_dir, inputs.arch, topology, settings)


def num_mini_batches(config: Config) -> int:
    """Optimizer steps of a step."""
    per_update = config.batch.mini_batch_prompts or config.data.prompts_per_step
    return config.data.prompts_per_step // per_update


def build_checkpointer(
    config: Config, inputs: Inputs, policy: MegatronPolicy
) -> MegatronCheckpointer:
    """Checkpoints under the run's folder; those of another model are refused."""
    return MegatronCheckpointer(
        Path(config.run.dir) / "checkpoints",
        policy,
        keep=config.checkpoint.keep,
        fingerprint=model_fingerprint(inputs.arch, DTYPES[config.model.dtype]),
        hf_source=inputs.model_dir,
    )


def load_start_weights(
    config: Config, policy: MegatronPolicy, checkpointer: MegatronCheckpointer
) -> None:
    """Start from the weights of ``model.weights``, where it is set. Collective.

    A resumed run does so too: its KL penalty is against the policy that the run started from.

    Raises:
        CheckpointError: it is no complete checkpoint, or of another model.
    """
    if config.model.weights is None:
        return
    path = Path(config.model.weights).expanduser()
    try:
        step = checkpointer.load_weights(path)
    except CheckpointError as error:
        raise CheckpointError(f"model.weights={config.model.weights}: {error}") from error
    policy.start_from_present_weights()
    logger.info("the weights to start from are those of %s (%d steps)", path, step)


def build_tier(
    config: Config, inputs: Inputs, topology: Topology, control: ControlPlane
) -> RolloutTier:
    """Rollout engine and reward workers, on rank 0; the other ranks' way to their results."""
    engine = reward = None
    if topology.rank == 0:
        reward = RewardPool(
            config.reward.function or VERIFIERS[config.reward.kind],
            workers=config.reward.workers,
            timeout_s=config.reward.timeout_s,
        )
        reward.check((*inputs.train_prompts, *inputs.heldout))
        engine = build_engine(config, inputs, topology)
    return RolloutTier(
        engine=engine,
        reward=reward,
        control=control,
        group=topology.world_group,
        temperature=config.rollout.temperature,
        seed=config.run.seed,
    )


def build_engine(config: Config, inputs: Inputs, topology: Topology) -> RolloutEngine:
    """The rollout engine, on rank 0."""
    rollout = config.rollout
    if rollout.engine == "hf":
        return HfEngine(
            inputs.model_dir,
            max_tokens=rollout.max_tokens,
            batch_size=rollout.batch_size,
            stop_token_ids=inputs.stop_ids,
            pad_token_id=pad_token_id(inputs.tokenizer, inputs.stop_ids),
            dtype=DTYPES[config.model.dtype],
            device=topology.device,
            num_threads=rollout.threads,
        )
    on_gpu = topology.device.type == "cuda"
    return build_vllm_engine(
        VllmSpec(
            **rollout.vllm.model_dump(exclude={"probe_tolerance"}),
            model_dir=inputs.model_dir,
            dtype=config.model.dtype,
            max_tokens=rollout.max_tokens,
            max_model_len=config.data.max_prompt_tokens + rollout.max_tokens,
            stop_token_ids=inputs.stop_ids,
            use_gpu=on_gpu,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            trainer_gpus=int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if on_gpu else 0,
        )
    )


def build_parts(
    config: Config,
    inputs: Inputs,
    policy: MegatronPolicy,
    checkpointer: MegatronCheckpointer,
    tier: RolloutTier,
    state: LoopState,
    stop: StopSignal,
) -> Parts:
    """Everything the loop needs, for a run that starts at ``state``."""
    topology = policy.topology
    recorder = Recorder(
        config,
        enabled=topology.rank == 0,
        start_step=state.step,
        pending=state.evaluated(state.step),
    )
    return Parts(
        config=config,
        prompts=inputs.train,
        policy=policy,
        tier=replace(tier, watch=recorder.sampling),
        heldout=HeldoutStage(inputs.heldout, config),
        checkpointer=checkpointer,
        recorder=recorder,
        stop=stop,
        row_limits=RowLimits(
            tokens=config.batch.micro_batch_tokens,
            sequences=config.batch.micro_batch_sequences,
            multiple=row_multiple(
                tensor=topology.tensor_size, sequence_parallel=config.parallel.sequence
            ),
            equal_lengths=topology.pipeline_size > 1,
        ),
        group=topology.world_group,
    )
