"""What DynaMO's modulation costs in the training part of a step, next to plain GRPO.

Both do the same work on the same rollouts: the old-policy pass, then one optimizer step. DynaMO
folds its factors into the advantages in between. They alternate in one process; the figure is the
median ratio of CPU seconds. The old-policy pass, which both have, is printed beside it.

    python benchmarks/step_overhead.py [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import megatron_patches

megatron_patches.apply()

from dynamo_megatron.actor.forward_step import LossSettings  # noqa: E402
from dynamo_megatron.actor.optimizer import OptimizerSettings  # noqa: E402
from dynamo_megatron.actor.policy import MegatronPolicy, PolicySettings  # noqa: E402
from dynamo_megatron.actor.topology import init_topology, init_torch_distributed  # noqa: E402
from dynamo_megatron.assets import TINY_POLICY  # noqa: E402
from dynamo_megatron.batching.split import RowLimits, plan_mini_batches  # noqa: E402
from dynamo_megatron.config import ClipConfig, ModulationConfig  # noqa: E402
from dynamo_megatron.hf.architecture import read_architecture  # noqa: E402
from dynamo_megatron.stages.modulation import modulate_batch  # noqa: E402
from dynamo_megatron.types import (  # noqa: E402
    TokenInputs,
    TrainBatch,
    ragged_offsets,
)

GRPO = ModulationConfig(gradient_compensation=False, stabilization=False)
DYNAMO = ModulationConfig()


def rollouts(num_groups: int, size: int, vocab_size: int) -> TrainBatch:
    """Sequences as in the quickstart: prompts of 20 to 40 tokens, responses of 15 to 45."""
    g = torch.Generator().manual_seed(0)
    count = num_groups * size
    prompts = torch.randint(20, 41, (num_groups,), generator=g).repeat_interleave(size)
    responses = torch.randint(15, 46, (count,), generator=g)
    lengths = prompts + responses
    return TrainBatch(
        tokens=torch.randint(0, vocab_size, (int(lengths.sum()),), generator=g),
        token_offsets=ragged_offsets(lengths.tolist()),
        prompt_lengths=prompts,
        response_offsets=ragged_offsets(responses.tolist()),
        group_index=torch.arange(num_groups).repeat_interleave(size),
        sampler_logp=torch.zeros(int(responses.sum())),
        advantages=torch.randn(count, generator=g).repeat_interleave(responses),
    )


def build_policy() -> MegatronPolicy:
    """The shipped policy on one rank, with a learning rate that moves nothing."""
    init_torch_distributed()
    settings = PolicySettings(
        temperature=1.0,
        dtype=torch.float32,
        sequence_parallel=False,
        recompute=False,
        vocab_multiple=4,
        loss=LossSettings(clip_low=0.2, clip_high=0.28, dual_clip=10.0),
        optimizer=OptimizerSettings(
            name="adam",
            lr=1e-9,
            min_lr=0.0,
            warmup_updates=0,
            decay_style="constant",
            decay_updates=1000,
            weight_decay=0.0,
            beta1=0.9,
            beta2=0.999,
            epsilon=1e-8,
            clip_grad=1.0,
            distributed=False,
        ),
    )
    topology = init_topology(tensor=1, pipeline=1, seed=0)
    return MegatronPolicy(TINY_POLICY, read_architecture(TINY_POLICY), topology, settings)


def cpu_seconds(work: Callable[[], object]) -> float:
    """CPU seconds of a call; other processes do not count."""
    begin = time.process_time()
    work()
    return time.process_time() - begin


def measure(num_groups: int, size: int, repetitions: int) -> dict[str, float]:
    """Median CPU seconds of both and their ratio."""
    policy = build_policy()
    batch = rollouts(num_groups, size, policy.arch.vocab_size)
    plan = plan_mini_batches(
        batch,
        num_groups=num_groups,
        groups_per_mini_batch=num_groups,
        data_parallel=1,
        limits=RowLimits(tokens=4096),
    )

    def step(config: ModulationConfig) -> None:
        old = policy.token_stats(batch, plan)
        group = policy.topology.world_group
        modulated = modulate_batch(batch, plan, old, config, ClipConfig(), group=group)
        policy.update(
            plan, TokenInputs(advantages=modulated.batch.advantages, old_logp=old.stats.logp)
        )

    step(DYNAMO), step(GRPO)
    grpo, dynamo, ratios = [], [], []
    for i in range(repetitions):
        order = (GRPO, DYNAMO) if i % 2 else (DYNAMO, GRPO)
        seconds = {id(config): cpu_seconds(lambda config=config: step(config)) for config in order}
        grpo.append(seconds[id(GRPO)])
        dynamo.append(seconds[id(DYNAMO)])
        ratios.append(dynamo[-1] / grpo[-1])
    stats_pass = statistics.median(
        cpu_seconds(lambda: policy.token_stats(batch, plan)) for _ in range(3)
    )
    return {
        "response_tokens": batch.num_response_tokens,
        "grpo_s": statistics.median(grpo),
        "dynamo_s": statistics.median(dynamo),
        "ratio": statistics.median(ratios),
        "ratio_low": min(ratios),
        "ratio_high": max(ratios),
        "old_policy_pass_share": stats_pass / statistics.median(grpo),
    }


def main() -> None:
    """Print the table; write the same figures as JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small batch, few repetitions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = measure(8, 4, 3) if options.quick else measure(32, 8, 11)
    table = Table(title="training part of a step, CPU seconds, medians")
    for name in ("response tokens", "GRPO", "DynaMO", "ratio", "lowest", "highest", "old pass"):
        table.add_column(name, justify="right")
    table.add_row(
        f"{figures['response_tokens']:.0f}",
        f"{figures['grpo_s']:.3f}",
        f"{figures['dynamo_s']:.3f}",
        f"{figures['ratio']:.3f}",
        f"{figures['ratio_low']:.3f}",
        f"{figures['ratio_high']:.3f}",
        f"{100 * figures['old_policy_pass_share']:.0f} % of GRPO",
    )
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
