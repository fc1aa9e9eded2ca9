"""The loop, the same on every rank."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import psutil
from torch.distributed import ProcessGroup

from dynamo_megatron.batching.pack import kept_rollouts, pack
from dynamo_megatron.batching.split import RowLimits, plan_mini_batches
from dynamo_megatron.config import Config
from dynamo_megatron.load_config import to_yaml
from dynamo_megatron.parallel.digest import require_agreement
from dynamo_megatron.parallel.reduce import raise_together
from dynamo_megatron.protocols import Checkpointer, MetricValue, PolicyActor, PromptSource
from dynamo_megatron.recorder import Recorder
from dynamo_megatron.reward.shuffle import shuffled_rewards
from dynamo_megatron.rollout.errors import SamplerMismatchError
from dynamo_megatron.rollout.gate import check_sampler_agreement
from dynamo_megatron.signals import StopRequested, StopSignal
from dynamo_megatron.stages.advantages import num_zero_groups, rollout_advantages
from dynamo_megatron.stages.allocation import num_cold, observed
from dynamo_megatron.stages.correction import corrected_inputs
from dynamo_megatron.stages.heldout import HeldoutStage
from dynamo_megatron.stages.metrics import (
    rollout_metrics,
    step_counters,
    token_metrics,
    update_metrics,
)
from dynamo_megatron.stages.modulation import current_modulation, modulate_batch
from dynamo_megatron.stages.sampling import RolloutTier
from dynamo_megatron.state import LoopState
from dynamo_megatron.stopwatch import Stopwatch
from dynamo_megatron.types import (
    DataCursor,
    GroupSizes,
    OwnedStats,
    Prompt,
    RolloutGroup,
    TrainBatch,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """Everything a run is made of, built by ``build``."""

    config: Config
    prompts: PromptSource
    policy: PolicyActor
    tier: RolloutTier
    heldout: HeldoutStage
    checkpointer: Checkpointer
    recorder: Recorder
    stop: StopSignal
    row_limits: RowLimits
    group: ProcessGroup


def train(parts: Parts, state: LoopState, *, saved_step: int | None = None) -> LoopState:
    """Run from ``state`` to the configured number of steps, or until SIGTERM or Ctrl-C.

    Collective. Evaluates at the start, at the end and in between as configured, and saves when due.

    Args:
        parts: of the run.
        state: where to start.
        saved_step: the step of which a checkpoint exists already.
    """
    num_steps, first = parts.config.run.num_steps, state.step
    try:
        state = evaluate_if_due(parts, state)
        while state.step < num_steps:
            state = train_step(parts, state, gate=state.step == first)
            state = evaluate_if_due(parts, state)
            if _save_due(parts.config, state.step):
                saved_step = save(parts, state)
            parts.stop.check(parts.group)
    except StopRequested:
        logger.warning(
            "stopping on a signal after %d of %d steps; go on with run.resume=if_present",
            state.step,
            num_steps,
        )
    if saved_step != state.step:
        save(parts, state)
    return state


def train_step(parts: Parts, state: LoopState, *, gate: bool) -> LoopState:
    """One step: rollouts for one draw of prompts, and the optimizer steps on them."""
    config, clock = parts.config, Stopwatch()
    algorithm = config.algorithm
    with clock("weights"):
        parts.tier.load_weights(parts.policy.weights(), version=state.step)
    prompts, cursor = parts.prompts.take(config.data.prompts_per_step, state.cursor)
    priorities = state.history if algorithm.allocation.refresh == "step" else state.epoch_history
    sizes = parts.tier.allocate(prompts, priorities, algorithm.allocation)
    require_agreement(_plan_digests(state, prompts, sizes), step=state.step, group=parts.group)
    with clock("rollout"):
        groups = parts.tier.sample(prompts, sizes, step=state.step)
    parts.stop.check(parts.group)
    scored = _control_groups(groups, config, state.step) if config.reward.shuffle else groups
    advantages = rollout_advantages(scored, algorithm)
    batch = pack(scored, advantages, mask_truncated=algorithm.advantage.mask_truncated)
    plan = plan_mini_batches(
        batch,
        num_groups=len(groups),
        groups_per_mini_batch=config.batch.mini_batch_prompts or len(groups),
        data_parallel=parts.policy.data_size,
        limits=parts.row_limits,
    )
    with clock("stats"):
        old = parts.policy.token_stats(batch, plan)
        reference = parts.policy.reference_logp(batch, plan)
    if gate:
        check_gate(parts, batch, old, scored, state.step)
    modulated = modulate_batch(
        batch, plan, old, algorithm.modulation, algorithm.clip, group=parts.group
    )
    inputs = corrected_inputs(batch, old, modulated, reference, algorithm)
    with clock("update"):
        updates = parts.policy.update(
            plan,
            inputs,
            current_modulation(modulated.ranges, algorithm.modulation, algorithm.clip),
        )
    if not updates:
        logger.warning(
            "step %d has no response to train on (failed verifications, or truncated and masked): "
            "no update",
            state.step,
        )
    times = clock.metrics()
    metrics: dict[str, MetricValue] = {
        **rollout_metrics(groups, sizes, threshold=algorithm.allocation.success_threshold),
        **token_metrics(
            batch,
            old,
            modulated,
            inputs.loss_weights,
            algorithm.correction,
            counts_here=parts.policy.reports_tokens,
            group=parts.group,
        ),
        **update_metrics(updates),
        "advantage/zero_groups": float(num_zero_groups(advantages)),
        "allocation/cold": float(num_cold(prompts, priorities, algorithm.allocation)),
        "data/epoch": float(cursor.epoch),
        "memory/rss_mib": psutil.Process().memory_info().rss / 2**20,
        "perf/tokens_per_second": batch.num_response_tokens / times["time/step"],
        **times,
    }
    parts.recorder.step(state.step, metrics, groups)
    return _advanced(state, cursor, scored, config, step_counters(groups, updates))


def _advanced(state, cursor: DataCursor, groups, config: Config, counted) -> LoopState:
    allocation = config.algorithm.allocation
    history = observed(state.history, groups, allocation.success_threshold)
    epoch_history = state.epoch_history
    if cursor.epoch != state.cursor.epoch:
        history = history.decayed(allocation.decay)
        epoch_history = history
    return replace(
        state,
        step=state.step + 1,
        cursor=cursor,
        history=history,
        epoch_history=epoch_history,
        counters=state.counters + counted,
    )


def check_gate(
    parts: Parts, batch: TrainBatch, old: OwnedStats, groups: Sequence[RolloutGroup], step: int
) -> None:
    """Stop before the first update when sampler and trainer disagree about the same tokens.

    Each rank checks the tokens it owns; a failure is raised on all.
    """
    kept = kept_rollouts(groups, mask_truncated=parts.config.algorithm.advantage.mask_truncated)
    failure = None
    try:
        check_sampler_agreement(
            old.stats.logp,
            batch.sampler_logp,
            response_offsets=batch.response_offsets,
            prompt_ids=[groups[g].prompt.id for g, _ in kept],
            rollout_indices=[k for _, k in kept],
            tolerance=parts.config.rollout.gate_tolerance,
            step=step,
            compared_T=old.owned,
        )
    except SamplerMismatchError as error:
        failure = error
    raise_together(failure, phase="compare sampler and trainer", group=parts.group)


def evaluate_if_due(parts: Parts, state: LoopState) -> LoopState:
    """Held-out pass@1 of the policy as it is, unless it was measured before."""
    config, step = parts.config, state.step
    every = config.evaluation.every
    due = step in (0, config.run.num_steps) or (every > 0 and step % every == 0)
    if not due or not parts.heldout.prompts or state.evaluated(step):
        return state
    parts.tier.load_weights(parts.policy.weights(), version=step)
    result = parts.heldout.run(parts.tier, step)
    parts.recorder.evaluation(result)
    return replace(state, evaluations=(*state.evaluations, result))


def save(parts: Parts, state: LoopState) -> int:
    """Write a checkpoint; returns the step it is of."""
    parts.checkpointer.save(state.step, state.to_json(), to_yaml(parts.config))
    return state.step


def _save_due(config: Config, step: int) -> bool:
    every = config.checkpoint.every
    return every > 0 and step % every == 0


def _plan_digests(state: LoopState, prompts: Sequence[Prompt], sizes: GroupSizes) -> dict[str, str]:
    return {
        "step": str(state.step),
        "prompts": _sha256([prompt.id for prompt in prompts]),
        "group sizes": _sha256(list(sizes.sizes)),
        "prompt history": state.history.digest(),
    }


def _sha256(value: list) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()


def _control_groups(
    groups: Sequence[RolloutGroup], config: Config, step: int
) -> list[RolloutGroup]:
    """The same rollouts with rewards that say nothing about them."""
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    shuffled = iter(shuffled_rewards(verdicts, seed=config.run.seed, step=step))
    return [
        replace(group, verdicts=tuple(next(shuffled) for _ in group.verdicts)) for group in groups
    ]
