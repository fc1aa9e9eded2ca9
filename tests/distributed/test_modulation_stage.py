"""Given the same per-token statistics, normalisers and factors are the same bits on any split."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from dynamo_megatron.batching.split import RowLimits, plan_mini_batches
from dynamo_megatron.config import ClipConfig, CorrectionConfig, ModulationConfig
from dynamo_megatron.stages.metrics import token_metrics
from dynamo_megatron.stages.modulation import modulate_batch
from dynamo_megatron.types import OwnedStats, TokenStats
from tests.policies import random_batch
from tests.ranks import run_on_ranks

CONFIG = ModulationConfig(tau=0.5, gamma=10.0)


def statistics(num_tokens: int) -> TokenStats:
    g = torch.Generator().manual_seed(8)
    entropy = torch.rand(num_tokens, generator=g) * 2
    logp = -torch.rand(num_tokens, generator=g) * 3
    q = torch.rand(num_tokens, generator=g) * 0.2
    return TokenStats(logp=logp, entropy=entropy, lam=logp + entropy, sum_pi2=q, q=q)


def split_over(ranks: int, config: ModulationConfig, sequences_in_row: int | None):
    """Every rank keeps only what it owns; the rest is rubbish, as in a real run."""

    def work():
        batch, rank = random_batch(), dist.get_rank()
        plan = plan_mini_batches(
            batch,
            num_groups=4,
            groups_per_mini_batch=2,
            data_parallel=ranks,
            limits=RowLimits(tokens=40, sequences=sequences_in_row),
        )
        owned = torch.zeros(batch.num_response_tokens, dtype=torch.bool)
        for mini_batch in plan:
            for row in mini_batch.micro_batches[rank]:
                owned[row.token_index] = True
        full = statistics(batch.num_response_tokens)
        mine = TokenStats(
            *(torch.where(owned, getattr(full, n), torch.nan) for n in TokenStats.__slots__)
        )
        old = OwnedStats(stats=mine, owned=owned)
        group = dist.group.WORLD
        done = modulate_batch(batch, plan, old, config, ClipConfig(), group=group)
        metrics = token_metrics(
            batch,
            replace(old, stats=full),
            done,
            None,
            CorrectionConfig(),
            counts_here=True,
            group=group,
        )
        return owned, done.batch.advantages, done.ranges, metrics

    return run_on_ranks(work, ranks)


@pytest.mark.parametrize("scope", ["mini_batch", "step"])
@pytest.mark.parametrize(("ranks", "sequences_in_row"), [(1, 1), (1, 2), (2, None), (4, 1)])
def test_the_split_changes_no_bit(ranks, sequences_in_row, scope):
    config = CONFIG.model_copy(update={"scope": scope})
    ((_, want, want_ranges, want_metrics),) = split_over(1, config, None)
    joined = torch.full_like(want, torch.nan)
    for owned, advantages, ranges, metrics in split_over(ranks, config, sequences_in_row):
        assert ranges == want_ranges
        joined[owned] = advantages[owned]
        assert metrics == pytest.approx(want_metrics)
    assert torch.equal(joined, want)


def test_the_scope_is_the_mini_batch_or_the_step():
    (by_mini_batch,) = split_over(1, CONFIG, None)
    (by_step,) = split_over(1, CONFIG.model_copy(update={"scope": "step"}), None)
    first, second = by_mini_batch[2]
    assert first != second
    assert by_step[2] == (first.merged(second),) * 2


def test_a_nan_on_one_rank_is_an_error_on_all():
    def work():
        batch = random_batch()
        plan = plan_mini_batches(
            batch,
            num_groups=4,
            groups_per_mini_batch=4,
            data_parallel=2,
            limits=RowLimits(tokens=40),
        )
        stats = statistics(batch.num_response_tokens)
        owned = torch.zeros(batch.num_response_tokens, dtype=torch.bool)
        for row in plan[0].micro_batches[dist.get_rank()]:
            owned[row.token_index] = True
        if dist.get_rank() == 1:
            stats.entropy[owned.nonzero()[0]] = torch.nan
        with pytest.raises(ValueError, match="NaN or infinite"):
            modulate_batch(
                batch,
                plan,
                OwnedStats(stats=stats, owned=owned),
                CONFIG,
                ClipConfig(),
                group=dist.group.WORLD,
            )

    run_on_ranks(work, 2)
