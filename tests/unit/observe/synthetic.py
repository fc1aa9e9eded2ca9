"""A made-up run with the shapes that real ones have.

``python -m tests.unit.observe.synthetic RUN_DIR [NUM_STEPS]`` writes its metrics, to look at the
plots with.
"""

import math
import random
import sys
from collections import Counter
from pathlib import Path

from dynamo_megatron.observe.sinks import JsonlSink


def synthetic_metrics(step: int, num_steps: int, generator: random.Random) -> dict:
    """Metrics of one step of a run that learns, spreads its group sizes and keeps its entropy."""
    done = step / max(1, num_steps - 1)
    reward = 0.12 + 0.7 / (1 + math.exp(-8 * (done - 0.45))) + generator.gauss(0, 0.025)
    entropy = 0.9 * math.exp(-1.6 * done) + 0.25 + generator.gauss(0, 0.012)
    sizes = [
        min(24, max(8, round(generator.gauss(16, 0.3 + 5.5 * min(1, 3 * done))))) for _ in range(64)
    ]
    metrics = {
        "reward/mean": reward,
        "reward/pass_rate": reward,
        "entropy/old_mean": entropy,
        "train/entropy": entropy * 0.985,
        "train/grad_norm": 0.5 + 0.4 * generator.random() + 0.9 * math.exp(-5 * done),
        "train/skipped": float(step == num_steps // 3),
        "allocation/hist": {str(size): count for size, count in sorted(Counter(sizes).items())},
        "allocation/size_mean": 16.0,
        "modulation/compensated_share": 0.31 + 0.05 * math.sin(6 * done) + generator.gauss(0, 0.01),
        "modulation/damped_share": 0.08 * (1 - 0.6 * done) + abs(generator.gauss(0, 0.004)),
        "modulation/compensation_mean": 1.06 + 0.01 * math.sin(5 * done),
        "modulation/stabilization_mean": 0.97 + 0.015 * done,
        "rollout/logp_gap_mean": 0.008 + 0.006 * done + abs(generator.gauss(0, 0.001)),
        "rollout/logp_gap_max": 0.4 + 2.0 * done * generator.random(),
        "rollout/ratio_q01": 0.97 - 0.02 * done,
        "rollout/ratio_q99": 1.03 + 0.02 * done,
        "rollout/effective_sample_size": 0.9996 - 0.006 * done + generator.gauss(0, 1e-4),
    }
    if step % max(1, num_steps // 6) == 0 or step == num_steps - 1:
        metrics |= {
            "eval/pass@1": reward - 0.05,
            "eval/pass@1_low": reward - 0.09,
            "eval/pass@1_high": reward - 0.01,
        }
    return metrics


def write_synthetic_run(run_dir: Path, num_steps: int) -> None:
    generator = random.Random(0)
    sink = JsonlSink(run_dir / "metrics.jsonl")
    for step in range(num_steps):
        sink.write(step, synthetic_metrics(step, num_steps, generator))
    sink.close()


if __name__ == "__main__":
    write_synthetic_run(Path(sys.argv[1]), int((sys.argv[2:] or ["200"])[0]))
