"""Runs the trainer as torchrun would, in forked ranks that share this process's imports."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import warnings
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

SMALL = {
    "run.num_steps": 2,
    "run.seed": 5,
    "model.path": "builtin:tiny",
    "parallel.vocab_multiple": 4,
    "data.prompts_per_step": 4,
    "data.max_prompt_tokens": 64,
    "rollout.max_tokens": 24,
    "algorithm.allocation.n_low": 2,
    "algorithm.allocation.n_mean": 3,
    "algorithm.allocation.n_high": 6,
    "algorithm.allocation.init": 2,
    "optimizer.lr": 1e-3,
    "optimizer.warmup_updates": 0,
    "checkpoint.every": 0,
    "checkpoint.export_hf": False,
    "observe.tensorboard": False,
    "observe.plots": False,
}
BASE = """\
run: {num_steps: 2}
data:
  train:
    - {kind: arithmetic, split: train, num_problems: 12, seed: 1}
"""


@dataclass
class Ranks:
    """Ranks of one launch."""

    processes: list
    logs: list[Path]

    def wait(self, timeout: float = 120.0) -> list[int]:
        """Exit codes; ranks that do not end in time are killed, with -9 as their code."""
        deadline = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(deadline - time.monotonic(), 0.0))
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()
        return [process.exitcode for process in self.processes]

    def signal(self, rank: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.processes[rank].pid, number)

    def log(self, rank: int) -> str:
        return self.logs[rank].read_text(encoding="utf-8", errors="replace")


def arguments(folder: Path, run_dir: Path, base: str = BASE, **overrides) -> list[str]:
    """A command line for a small run; keyword ``a__b`` overrides ``a.b``."""
    config = folder / "config.yaml"
    config.write_text(base, encoding="utf-8")
    values = SMALL | {"run.dir": str(run_dir)}
    values |= {name.replace("__", "."): value for name, value in overrides.items()}
    pairs = [f"{name}={json.dumps(value)}" for name, value in values.items()]
    return ["--config", str(config), *pairs]


def start(argv: list[str], world_size: int, log_dir: Path) -> Ranks:
    """Fork the ranks of one launch and return at once."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    log_dir.mkdir(parents=True, exist_ok=True)
    context = get_context("fork")
    processes, logs = [], []
    for rank in range(world_size):
        log = log_dir / f"rank{rank}.log"
        process = context.Process(target=_rank, args=(argv, rank, world_size, port, log))
        process.start()
        processes.append(process)
        logs.append(log)
    return Ranks(processes, logs)


def launch(argv: list[str], world_size: int, log_dir: Path, timeout: float = 120.0) -> Ranks:
    """Run to the end; every rank must exit with 0."""
    ranks = start(argv, world_size, log_dir)
    codes = ranks.wait(timeout)
    assert codes == [0] * world_size, f"exit codes {codes}\n" + "\n".join(
        ranks.log(rank) for rank in range(world_size)
    )
    return ranks


def _rank(argv: list[str], rank: int, world_size: int, port: int, log: Path) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1)
    sys.stderr = os.fdopen(2, "w", buffering=1)
    from dynamo_megatron import train

    # pytest turns warnings into errors; a launched process has Python's own filters.
    warnings.resetwarnings()
    warnings.simplefilter("ignore")
    try:
        code = train.main(argv)
    except SystemExit as end:
        code = end.code or 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 70
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def metrics_of(run_dir: Path) -> list[dict]:
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def log_of(run_dir: Path) -> str:
    return (run_dir / "run.log").read_text(encoding="utf-8")
