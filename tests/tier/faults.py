"""Real runs and real faults: processes of a run, and how to break one."""

from __future__ import annotations

import getpass
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from dynamo_megatron.rollout.vllm.cluster import RayReplica
from dynamo_megatron.types import Rollout
from tests.tier.conftest import ROUNDING

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "configs" / "quickstart.yaml"
MARK = "DYNAMO_TEST_RUN"
"""In the environment of every process of a run, whoever started it."""


def killed(replica: RayReplica) -> None:
    os.kill(pid_of(replica), signal.SIGKILL)


def frozen(replica: RayReplica) -> None:
    os.kill(pid_of(replica), signal.SIGSTOP)


def out_of_memory(replica: RayReplica) -> None:
    """Its memory is used up to the last hundred bytes, and the system gives no more."""

    def use_up(worker: Any) -> None:  # nested: it travels by value
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (1 << 20, 1 << 20))
        worker.hoard = []
        size = 1 << 24
        while size > 32:
            try:
                worker.hoard.append(bytes(size))
            except MemoryError:
                size //= 2

    replica.call("_rpc", use_up)


def pid_of(replica: RayReplica) -> int:
    assert replica.facts is not None
    return replica.facts.process.pid


def wait_for(condition: Callable[[], object], timeout: float, what: str) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"{what}: not within {timeout} s"
        time.sleep(0.1)


def same_samples(got: Sequence[Rollout], want: Sequence[Rollout]) -> None:
    """The same rollouts of the same weights: tokens, seeds, logprobs.

    Both come from one machine; a batch of another shape moves a logprob by rounding, which a draw
    between two equally likely tokens could show. None of these requests has such a draw.
    """
    assert [(r.prompt_id, r.index, r.seed) for r in got] == [
        (r.prompt_id, r.index, r.seed) for r in want
    ]
    for a, b in zip(got, want, strict=True):
        assert a.token_ids == b.token_ids, (a.prompt_id, a.index)
        assert a.finish_reason == b.finish_reason
        gaps = [abs(x - y) for x, y in zip(a.logprobs, b.logprobs, strict=True)]
        assert max(gaps, default=0.0) < ROUNDING


@dataclass
class Run:
    """A training under torchrun, two ranks, in a session of its own."""

    folder: Path
    overrides: dict[str, object] = field(default_factory=dict)
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        values = {
            "run.dir": str(self.run_dir),
            "run.num_steps": 500,
            "run.heartbeat_timeout_s": 15,
            "rollout.engine": "vllm",
            "rollout.vllm.kv_cache_mib": 32,
            "rollout.vllm.hang_timeout_s": 20,
            "data.prompts_per_step": 8,
            "evaluation.every": 0,
            "evaluation.report": False,
            "checkpoint.every": 0,
            "checkpoint.export_hf": False,
            "observe.plots": False,
            "observe.tensorboard": False,
        } | self.overrides
        pairs = [f"{name}={json.dumps(value)}" for name, value in values.items()]
        self._output = self.folder / f"output-{self.mark}.log"
        self._shared: set[Path] = set()
        self._temp = Path(tempfile.mkdtemp(prefix="tier-"))  # short: sockets lie under it
        settings = {MARK: self.mark, "OMP_NUM_THREADS": "1", "TMPDIR": str(self._temp)}
        compiled = Path(tempfile.gettempdir()) / f"torchinductor_{getpass.getuser()}"
        settings["TORCHINDUCTOR_CACHE_DIR"] = str(compiled)
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        training = ["-m", "dynamo_megatron.train", "--config", str(QUICKSTART), *pairs]
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, *launcher, *training],
                cwd=self.folder,
                env=os.environ | settings,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes():
            process.kill()
        self.process.kill()
        self.process.wait()
        shutil.rmtree(self._temp, ignore_errors=True)

    @property
    def run_dir(self) -> Path:
        return self.folder / "run"

    @property
    def output(self) -> str:
        return self._output.read_text(errors="replace")

    def processes(self) -> list[psutil.Process]:
        """All that live, orphans too; not those that nobody has waited for yet."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) != self.mark:
                    continue
                if process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def named(self, part: str) -> psutil.Process:
        """The one process of that name."""
        (found,) = (process for process in self.processes() if part in process.name())
        return found

    def rank(self, number: int) -> psutil.Process:
        """The process of a rank."""
        (found,) = (
            process
            for process in psutil.Process(self.process.pid).children()
            if process.environ().get("RANK") == str(number)
        )
        return found

    def steps(self) -> int:
        """Steps that are written down."""
        metrics = self.run_dir / "metrics.jsonl"
        lines = metrics.read_text().splitlines() if metrics.exists() else []
        return sum("train/loss" in json.loads(line) for line in lines if line.endswith("}"))

    def until_step(self, number: int) -> None:
        def there() -> bool:
            assert self.process.poll() is None, self.output
            return self.steps() >= number

        wait_for(there, 240, f"step {number}")

    def ended(self, timeout: float = 90.0) -> int:
        """Its exit code, with nothing of it left alive."""
        try:
            code = self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it hangs:\n{self.output}") from None
        wait_for(lambda: not self.processes(), 30, f"the end of {self.processes()}")
        return code

    def note_shared_memory(self) -> None:
        """Remember the shared memory that its processes use now."""
        for process in self.processes():
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            self._shared |= {
                Path(line.split(maxsplit=5)[5])
                for line in maps.splitlines()
                if " /dev/shm/" in line and not line.endswith("(deleted)")
            }

    def left_files(self) -> list[str]:
        """Temporary files, torchrun's aside, and noted shared memory that are still there."""
        shared = [str(path) for path in self._shared if path.exists()]
        files = [str(path) for path in self._temp.iterdir()]
        return shared + [name for name in files if "/torchelastic_" not in name]

    def foreign_listeners(self) -> list[str]:
        """Addresses beyond this machine on which a process of the run listens, torchrun's aside."""
        pids = {p.pid: p.name() for p in self.processes() if p.pid != self.process.pid}
        found = []
        for connection in psutil.net_connections("inet"):
            if connection.status != psutil.CONN_LISTEN or connection.pid not in pids:
                continue
            if connection.laddr.ip not in ("127.0.0.1", "::1", "::ffff:127.0.0.1"):
                found.append(f"{pids[connection.pid]} ({connection.pid}) on {connection.laddr}")
        return found
