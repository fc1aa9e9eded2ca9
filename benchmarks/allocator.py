"""How long the allocation takes, and how much variance it saves.

    python benchmarks/allocator.py [--quick] [--variance] [--json FILE]

The first table times `group_sizes` on random histories. The last column is the time over N log2 N:
it stays level (once the fixed cost is small) when the allocation is O(N log N). With ``--variance``
a second table gives sum_i p_i (1 - p_i) / n_i, the variance of the mean gradient in DynaMO's model,
relative to equal group sizes. Success rates are estimated from 16 fresh rollouts; the oracle knows
them. "bare" weights are the estimate itself, "trained" ones have the mastery cut and the floor that
training uses (they save less, because they spend on learning rather than on variance alone).
Absolute times depend on the machine.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dynamo_megatron.algo.allocation import (
    bernoulli_variance,
    fill,
    group_sizes,
    priority_weights,
    uniform_sizes,
)

N_LOW, N_HIGH, N_MEAN = 8, 24, 16
MASTERY, FLOOR = 0.85, 0.01
RULES = [("linear", "paper"), ("sqrt", "paper"), ("linear", "kkt"), ("sqrt", "kkt")]
DIFFICULTIES = [(0.5, 0.5), (1.0, 1.0), (1.0, 3.0)]


def random_history(num_prompts: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Counts of prompts with 0 to 64 rollouts, about one in eight of them cold."""
    rollouts = torch.randint(65, (num_prompts,), generator=generator).double()
    rates = torch.rand(num_prompts, generator=generator, dtype=torch.float64)
    return torch.binomial(rollouts, rates, generator=generator), rollouts


def time_allocation(num_prompts: int, form: str, rule: str, repeats: int) -> dict:
    """Best wall time of one whole allocation."""
    generator = torch.Generator().manual_seed(num_prompts)
    num_correct, num_rollouts = random_history(num_prompts, generator)
    budget = N_MEAN * num_prompts
    best = math.inf
    for _ in range(repeats):
        start = time.perf_counter()
        sizes = group_sizes(
            num_correct,
            num_rollouts,
            budget=budget,
            n_low=N_LOW,
            n_high=N_HIGH,
            init=4,
            form=form,
            rule=rule,
            mastery=MASTERY,
            floor=FLOOR,
        )
        best = min(best, time.perf_counter() - start)
    if int(sizes.sum()) != budget:
        raise RuntimeError(f"{int(sizes.sum())} rollouts allocated of a budget of {budget}")
    return {
        "num_prompts": num_prompts,
        "form": form,
        "rule": rule,
        "seconds": best,
        "ns_per_n_log_n": best * 1e9 / (num_prompts * math.log2(num_prompts)),
    }


def beta_rates(a: float, b: float, num_prompts: int) -> Tensor:
    """Success rates drawn from Beta(a, b), from torch's global generator."""
    shape = torch.Size([num_prompts])
    return torch.distributions.Beta(
        torch.tensor(a, dtype=torch.float64), torch.tensor(b, dtype=torch.float64)
    ).sample(shape)


def relative_variance(rates: Tensor, sizes: Tensor) -> float:
    """Sum of p (1 - p) / n, relative to that of equal sizes."""
    spread = rates * (1 - rates)
    equal = uniform_sizes(rates.numel(), int(sizes.sum()))
    return ((spread / sizes).sum() / (spread / equal).sum()).item()


def weigh(correct: Tensor, rollouts: Tensor, form: str, kind: str) -> Tensor:
    """Weights with ("trained") or without ("bare") mastery cut, floor and tie-break."""
    if kind == "trained":
        return priority_weights(correct, rollouts, form=form, mastery=MASTERY, floor=FLOOR)
    variance = bernoulli_variance(correct, rollouts)
    return variance.sqrt() if form == "sqrt" else variance


def measure_variance(a: float, b: float, kind: str, draws: int, num_prompts: int = 512) -> dict:
    """Mean relative variance of each rule for success rates of Beta(a, b)."""
    lower = torch.full((num_prompts,), N_LOW)
    bounds = {"upper": N_HIGH, "budget": N_MEAN * num_prompts}
    sums = dict.fromkeys([f"{form} {rule}" for form, rule in RULES] + ["oracle"], 0.0)
    torch.manual_seed(0)
    for _ in range(draws):
        rates = beta_rates(a, b, num_prompts)
        rollouts = torch.full_like(rates, N_MEAN)
        correct = torch.binomial(rollouts, rates)
        for form, rule in RULES:
            weights = weigh(correct, rollouts, form, kind)
            sizes = fill(weights, lower, rule=rule, **bounds)
            sums[f"{form} {rule}"] += relative_variance(rates, sizes)
        best = fill((rates * (1 - rates)).sqrt(), lower, rule="kkt", **bounds)
        sums["oracle"] += relative_variance(rates, best)
    labels = {"difficulty": f"Beta({a:g},{b:g})", "weights": kind}
    return labels | {name: total / draws for name, total in sums.items()}


def print_times(rows: list[dict], console: Console) -> None:
    """Print the table of times."""
    table = Table(title=f"Allocation, {N_LOW} to {N_HIGH} rollouts, mean {N_MEAN}")
    for name in ("prompts", "weight", "fill", "ms", "ns / (N log2 N)"):
        table.add_column(name, justify="left" if name in ("weight", "fill") else "right")
    for row in rows:
        table.add_row(
            f"{row['num_prompts']:,}",
            row["form"],
            row["rule"],
            f"{row['seconds'] * 1e3:.2f}",
            f"{row['ns_per_n_log_n']:.1f}",
        )
    console.print(table)


def print_variances(rows: list[dict], console: Console) -> None:
    """Print the table of variances."""
    table = Table(title="sum p (1 - p) / n relative to equal sizes, 512 prompts")
    for name in rows[0]:
        left = name in ("difficulty", "weights")
        table.add_column(name, justify="left" if left else "right", no_wrap=left)
    for row in rows:
        table.add_row(*(v if isinstance(v, str) else f"{v:.3f}" for v in row.values()))
    console.print(table)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="fewer prompts, repeats and draws")
    parser.add_argument("--variance", action="store_true", help="also the table of variances")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to FILE")
    arguments = parser.parse_args()

    counts = [1_000, 10_000, 100_000] + ([] if arguments.quick else [1_000_000])
    repeats = 2 if arguments.quick else 7
    console = Console()
    times = [
        time_allocation(count, form, rule, repeats)
        for count in counts
        for form, rule in (("linear", "paper"), ("sqrt", "kkt"))
    ]
    print_times(times, console)
    variances = []
    if arguments.variance:
        draws = 4 if arguments.quick else 40
        variances = [
            measure_variance(a, b, kind, draws)
            for kind in ("bare", "trained")
            for a, b in DIFFICULTIES
        ]
        print_variances(variances, console)
    if arguments.json:
        arguments.json.write_text(json.dumps({"times": times, "variance": variances}, indent=2))


if __name__ == "__main__":
    main()
