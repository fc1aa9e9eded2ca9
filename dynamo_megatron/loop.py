"""The loop, the same on every rank."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import psutil
from torch.distributed import ProcessGroup

from dynamo_megatron.batching.pack import pack
from dynamo_megatron.batching.split import RowLimits, plan_mini_batches
from dynamo_megatron.config import Config
from dynamo_megatron.load_config import to_yaml
from dynamo_megatron.parallel.digest import require_agreement
from dynamo_megatron.protocols import Checkpointer, MetricValue, PolicyActor, PromptSource
from dynamo_megatron.recorder import Recorder
from dynamo_megatron.reward.shuffle import shuffled_rewards
from dynamo_megatron.rollout.errors import RolloutError
from dynamo_megatron.signals import StopRequested, StopSignal
from dynamo_megatron.stages.advantages import num_zero_groups, rollout_advantages
from dynamo_megatron.stages.agreement import (
    NUM_PROBES,
    Tolerance,
    check_probe,
    require_agreement_of_samples,
)
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
from dynamo_megatron.stages.rounds import OneRound
from dynamo_megatron.stages.sampling import RolloutTier
from dynamo_megatron.state import Draw, LoopState, SampledBatch
from dynamo_megatron.stopwatch import Stopwatch
from dynamo_megatron.types import (
    DataCursor,
    GroupSizes,
    OwnedStats,
    Prompt,
    RolloutGroup,
    TrainBatch,
    UpdateStats,
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

    A stop before a step's update leaves the state as it was: what is being sampled is given up and
    is sampled again, the same, by the run that goes on. Later the step is finished, which with
    ``one_step_off`` includes the rollouts ahead: their weights have been replaced, so that only
    this checkpoint can bring them back.

    Args:
        parts: of the run.
        state: where to start.
        saved_step: the step of which a checkpoint exists already.
    """
    num_steps = parts.config.run.num_steps
    # After a start the first rollouts of its own weights; those that were saved are of older ones.
    first_own = state.step + int(state.ahead is not None)
    try:
        state = evaluate_if_due(parts, state)
        while state.step < num_steps:
            state = train_step(parts, state, gate=state.step == first_own)
            state = evaluate_if_due(parts, state)
            if _save_due(parts.config, state.step):
                saved_step = save(parts, state)
            parts.stop.check(parts.group)
    except StopRequested:
        parts.tier.give_up()
        logger.warning(
            "stopping on a signal after %d of %d steps; go on with run.resume=if_present",
            state.step,
            num_steps,
        )
    if saved_step != state.step:
        save(parts, state)
    return state


def train_step(parts: Parts, state: LoopState, *, gate: bool) -> LoopState:
    """One step: the optimizer steps on one draw of prompts and their rollouts.

    With ``one_step_off`` the next step's rollouts are sampled meanwhile, by the weights that this
    step starts from.

    Args:
        parts: of the run.
        state: before the step.
        gate: compare sampler and trainer, where the rollouts are of the present weights.
    """
    config, clock = parts.config, Stopwatch()
    algorithm = config.algorithm
    with clock("weights"):
        sync_weights(parts, state)
    with clock("rollout"):
        sampled = state.ahead or sample_batch(parts, state)
    stale = require_version(sampled, state)
    parts.stop.check(parts.group)
    groups = sampled.groups
    scored = _control_groups(groups, config, state.step) if config.reward.shuffle else groups
    after = _observed(state, sampled.draw.cursor, scored, config)
    drawn = begin_ahead(parts, after)
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
        check_gate(parts, batch, old, scored, state.step, stale=stale)
    modulated = modulate_batch(
        batch, plan, old, algorithm.modulation, algorithm.clip, group=parts.group
    )
    inputs = corrected_inputs(batch, old, modulated, reference, algorithm)
    parts.stop.check(parts.group)
    with clock("update"):
        updates = parts.policy.update(
            plan,
            inputs,
            current_modulation(modulated.ranges, algorithm.modulation, algorithm.clip),
        )
    _warn_if_idle(updates, state.step)
    with clock("rollout"):
        ahead = finish_ahead(parts, drawn)
    times = clock.metrics()
    metrics: dict[str, MetricValue] = {
        **batch_metrics(sampled, stale, algorithm.allocation.success_threshold),
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
        "memory/rss_mib": psutil.Process().memory_info().rss / 2**20,
        "perf/tokens_per_second": batch.num_response_tokens / times["time/step"],
        **times,
    }
    parts.recorder.step(state.step, metrics, groups)
    counted = state.counters + step_counters(groups, updates)
    return replace(after, counters=counted, ahead=ahead)


def sync_weights(parts: Parts, state: LoopState) -> None:
    """Give the rollout engine the policy as it is, as version ``state.step``. Collective.

    Every replica then samples a probe, whose logprobs must be the trainer's. Nothing is sent when
    the engine holds that version, as after an evaluation.
    """
    if parts.tier.version == state.step:
        return
    rollout = parts.config.rollout
    parts.tier.load_weights(parts.policy.weights(), version=state.step)
    probes, _ = parts.prompts.take(min(NUM_PROBES, len(parts.prompts)), DataCursor())
    tolerance = Tolerance(
        nats=rollout.vllm.probe_tolerance or rollout.gate_tolerance,
        phase="compare the sampler's probe and the trainer after a weight update",
    )
    check_probe(parts.tier, parts.policy, probes, parts.row_limits, tolerance, version=state.step)


def draw_prompts(parts: Parts, state: LoopState) -> Draw:
    """The prompts of the step at ``state`` and their group sizes, equal on every rank."""
    config = parts.config
    allocation = config.algorithm.allocation
    prompts, cursor = parts.prompts.take(config.data.prompts_per_step, state.cursor)
    priorities = state.history if allocation.refresh == "step" else state.epoch_history
    sizes = parts.tier.allocate(prompts, priorities, allocation)
    require_agreement(_plan_digests(state, prompts, sizes), step=state.step, group=parts.group)
    return Draw(
        step=state.step,
        prompts=tuple(prompts),
        sizes=sizes,
        cursor=cursor,
        num_cold=num_cold(prompts, priorities, allocation),
    )


def sample_batch(parts: Parts, state: LoopState) -> SampledBatch:
    """The rollouts of the step at ``state``, by the engine's present weights."""
    draw = draw_prompts(parts, state)
    groups = parts.tier.sample(draw.prompts, draw.sizes, step=draw.step)
    return SampledBatch(draw=draw, groups=tuple(groups))


def begin_ahead(parts: Parts, after: LoopState) -> Draw | None:
    """Begin to sample the next step's rollouts in the background, if the run has them ahead.

    Args:
        parts: of the run.
        after: the state after this step as far as rollouts depend on it: its rewards are known
            before it is trained on, so group sizes are those that ``sync`` would give.
    """
    if parts.config.rollout.mode == "sync" or after.step >= parts.config.run.num_steps:
        return None
    draw = draw_prompts(parts, after)
    parts.tier.start(draw.prompts, OneRound(draw.sizes), step=draw.step)
    return draw


def finish_ahead(parts: Parts, draw: Draw | None) -> SampledBatch | None:
    """Wait for what ``begin_ahead`` began; its failure is raised on every rank."""
    if draw is None:
        return None
    return SampledBatch(draw=draw, groups=tuple(parts.tier.finish()))


def require_version(sampled: SampledBatch, state: LoopState) -> int:
    """Check by which weights a step's rollouts were sampled.

    Returns:
        Their staleness in steps: 1 when they were sampled ahead, else 0.

    Raises:
        RolloutError: a rollout is of other weights, or the batch of another step.
    """
    stale = int(state.ahead is not None)
    wanted = state.step - stale
    found = {r.weight_version for group in sampled.groups for r in group.rollouts}
    if sampled.draw.step != state.step or found - {wanted}:
        raise RolloutError(
            f"step {state.step} was to train on its own rollouts by the weights after {wanted} "
            f"steps, and got those of step {sampled.draw.step} by the weights after "
            f"{sorted(found)} steps: the engine missed a load_weights, or its replicas hold "
            "different weights."
        )
    return stale


def _observed(state: LoopState, cursor: DataCursor, groups, config: Config) -> LoopState:
    """The state after the step that draws and samples ``groups``, but for what training counts."""
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
        ahead=None,
    )


def _warn_if_idle(updates: Sequence[UpdateStats], step: int) -> None:
    if not updates:
        logger.warning(
            "step %d has no response to train on (failed verifications, or truncated and masked): "
            "no update",
            step,
        )


def check_gate(
    parts: Parts,
    batch: TrainBatch,
    old: OwnedStats,
    groups: Sequence[RolloutGroup],
    step: int,
    *,
    stale: int,
) -> None:
    """Stop before the first update when sampler and trainer disagree about the same tokens.

    Each rank checks the tokens it owns; a failure is raised on all. Rollouts of older weights are
    no test: there sampler and trainer differ because they should.
    """
    if stale:
        logger.info(
            "step %d trains on rollouts by the weights before its own, as all that follow: sampler "
            "and trainer are not compared after this start",
            step,
        )
        return
    config = parts.config
    if config.rollout.top_p < 1.0 or config.rollout.top_k > 0:
        logger.warning(
            "the sampler's log-probabilities are of the distribution that rollout.top_p and "
            "rollout.top_k cut: they are not compared with the trainer's"
        )
        return
    tolerance = Tolerance(
        nats=config.rollout.gate_tolerance,
        phase="compare sampler and trainer before the first update",
        mask_truncated=config.algorithm.advantage.mask_truncated,
    )
    require_agreement_of_samples(batch, old, groups, tolerance, step=step, group=parts.group)


def evaluate_if_due(parts: Parts, state: LoopState) -> LoopState:
    """Held-out pass@1 of the policy as it is, unless it was measured before."""
    config, step = parts.config, state.step
    every = config.evaluation.every
    due = step in (0, config.run.num_steps) or (every > 0 and step % every == 0)
    if not due or not parts.heldout.prompts or state.evaluated(step):
        return state
    sync_weights(parts, state)
    result = parts.heldout.run(parts.tier, step)
    parts.recorder.evaluation(result)
    return replace(state, evaluations=(*state.evaluations, result))


def save(parts: Parts, state: LoopState) -> int:
    """Write a checkpoint; returns the step it is of."""
    rollouts = state.encoded_rollouts if state.ahead is not None else None
    parts.checkpointer.save(state.step, state.to_json(), to_yaml(parts.config), rollouts=rollouts)
    return state.step


def _save_due(config: Config, step: int) -> bool:
    every = config.checkpoint.every
    return every > 0 and step % every == 0


def batch_metrics(sampled: SampledBatch, stale: int, threshold: float) -> dict[str, MetricValue]:
    """What a step's rollouts and their draw report."""
    draw = sampled.draw
    return {
        **rollout_metrics(sampled.groups, draw.sizes, threshold=threshold),
        "rollout/staleness": float(stale),
        "allocation/cold": float(draw.num_cold),
        "data/epoch": float(draw.cursor.epoch),
    }


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
