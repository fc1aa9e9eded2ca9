"""``rollout.mode=one_step_off`` against the same schedule written out by hand, without threads."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from dynamo_megatron.algo.history import SuccessHistory
from dynamo_megatron.batching.pack import pack
from dynamo_megatron.batching.split import plan_mini_batches
from dynamo_megatron.config import Config
from dynamo_megatron.parallel.broadcast import broadcast_bytes
from dynamo_megatron.parallel.codec import decode_groups, encode_groups
from dynamo_megatron.stages.advantages import rollout_advantages
from dynamo_megatron.stages.allocation import allocate
from dynamo_megatron.stages.modulation import modulate_batch
from dynamo_megatron.types import DataCursor, RolloutGroup, TokenInputs
from tests.ranks import run_on_ranks
from tests.schedules import assert_equal_weights, config_at, parts_of, rows_of, run, weights_of


def _by_hand(config: Config):
    """The schedule, step by step. Returns (weights, history, one record a step)."""
    with parts_of(config) as (parts, _):
        engine, reward = parts.tier.engine, parts.tier.reward
        algorithm, zero = config.algorithm, dist.get_rank() == 0

        def hand_over(version: int) -> None:
            stream = parts.policy.weights()
            if zero:
                engine.load_weights(stream, version=version)
            for _ in stream:
                pass

        def sampled(step: int, cursor: DataCursor, history: SuccessHistory):
            prompts, cursor = parts.prompts.take(config.data.prompts_per_step, cursor)
            sizes = allocate(prompts, history, algorithm.allocation)
            payload = None
            if zero:
                rollouts = engine.generate(
                    prompts, sizes, step=step, temperature=1.0, seed=config.run.seed
                )
                groups = []
                for prompt in prompts:
                    own = tuple(r for r in rollouts if r.prompt_id == prompt.id)
                    verdicts = tuple(reward.score([(prompt, r) for r in own]))
                    groups.append(RolloutGroup(prompt=prompt, rollouts=own, verdicts=verdicts))
                payload = encode_groups(groups)
            return decode_groups(broadcast_bytes(payload, src=0, group=parts.group)), cursor

        def learn(groups: list[RolloutGroup]):
            advantages = rollout_advantages(groups, algorithm)
            batch = pack(groups, advantages)
            plan = plan_mini_batches(
                batch,
                num_groups=len(groups),
                groups_per_mini_batch=2,
                data_parallel=1,
                limits=parts.row_limits,
            )
            old = parts.policy.token_stats(batch, plan)
            modulated = modulate_batch(
                batch, plan, old, algorithm.modulation, algorithm.clip, group=parts.group
            )
            inputs = TokenInputs(advantages=modulated.batch.advantages, old_logp=old.stats.logp)
            return parts.policy.update(plan, inputs)

        history, cursor, records = SuccessHistory(), DataCursor(), []
        hand_over(0)
        groups, cursor = sampled(0, cursor, history)
        for step in range(config.run.num_steps):
            verdicts = [[v.reward for v in group.verdicts] for group in groups]
            history = history.updated(
                (group.prompt.id, sum(r >= 0.5 for r in rewards), len(rewards))
                for group, rewards in zip(groups, verdicts, strict=True)
            )
            following = None
            if step + 1 < config.run.num_steps:
                following, cursor = sampled(step + 1, cursor, history)  # by the present weights
            updates = learn(groups)
            hand_over(step + 1)
            versions = {r.weight_version for group in groups for r in group.rollouts}
            records.append(
                {
                    "step": step,
                    "rollout/staleness": float(step - versions.pop()),
                    "rollout/num": sum(map(len, verdicts)),
                    "rollout/tokens": sum(len(r.token_ids) for g in groups for r in g.rollouts),
                    "reward/mean": sum(map(sum, verdicts)) / sum(map(len, verdicts)),
                    "allocation/size_max": max(map(len, verdicts)),
                    "train/grad_norm": (updates[0].grad_norm + updates[1].grad_norm) / 2,
                    "train/lr": updates[1].learning_rate,
                }
            )
            assert not versions
            groups = following
        return weights_of(parts), history, records


@pytest.mark.parametrize("tensor", [1, 2])
def test_one_step_off_is_the_schedule_written_by_hand_bit_for_bit(tensor, tmp_path):
    layout = {"parallel__tensor": tensor}
    config = config_at(tmp_path, "loop", mode="one_step_off", **layout)
    by_hand = config_at(tmp_path, "hand", mode="one_step_off", **layout)
    want = run_on_ranks(_by_hand, tensor, by_hand, timeout=180)
    got = run_on_ranks(run, tensor, config, timeout=180)
    rows = rows_of(tmp_path / "loop")
    for (state, weights), (hand_weights, history, records) in zip(got, want, strict=True):
        assert_equal_weights(weights, hand_weights)
        assert state.history == history and state.step == 5 and state.ahead is None
        assert [{name: row[name] for name in records[0]} for row in rows] == records
    assert [row["rollout/staleness"] for row in rows] == [0, 1, 1, 1, 1]
    assert max(row["allocation/size_max"] for row in rows) > 3, "sizes follow the history"
    assert 0.0 < max(row["reward/mean"] for row in rows) < 1.0

    sync = config_at(tmp_path, "sync", mode="sync", **layout)
    (_, other), *_ = run_on_ranks(run, tensor, sync, timeout=180)
    assert any(not torch.equal(other[name], weights[name]) for name in weights)
    sync_rows = rows_of(tmp_path / "sync")
    assert sync_rows[0] == rows[0], "the first step is the same"
    assert [row["rollout/staleness"] for row in sync_rows] == [0] * 5
