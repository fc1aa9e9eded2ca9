"""The vLLM tier beside plain references: a memory copy, bare vLLM, static splitting.

    python benchmarks/rollout.py [--quick] [--part sync|throughput|idle] [--json FILE]

"sync" brings a random model's weights into one replica by each transport, and copies the same bytes
in memory in between; "ratio" is the sync's time over the copy's, medians of one run.

"throughput" samples the same prompts, group sizes and seeds by the tier (one replica) and by
``vllm.LLM.generate`` in a process of its own, from the same engine arguments and sampling
parameters. They alternate, the other one idle; "ratio" is the tier's tokens per second over bare
vLLM's, the median over the rounds, and "CPU ratio" the same by CPU seconds (the replica's and this
process's against bare vLLM's), which other work on the machine disturbs less. The tier's time
includes text and everything else that makes a rollout; vLLM's is the call alone.

"idle" samples from a random policy of the shipped one's shape, of whose 275 tokens 6 end a
response: the lengths are geometric, most short and some long. Two replicas have few places, so work
waits. It counts the places that are empty until the last request starts. "static" is the same with
the requests split evenly in advance.

Runs on GPUs where there are some (not measured there), else on the CPU with one thread a process.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
import torch
from bare_vllm import answer, bare_process
from convert import write_model
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file

from dynamo_megatron.assets import TINY_POLICY
from dynamo_megatron.config import ArithmeticSource
from dynamo_megatron.data.prompts import tokenize_prompts
from dynamo_megatron.data.sources import load_problems
from dynamo_megatron.data.tokenizer import load_tokenizer
from dynamo_megatron.rollout.seeds import rollout_seed
from dynamo_megatron.rollout.vllm.build import VllmSpec, build_vllm_engine, replica_settings
from dynamo_megatron.rollout.vllm.engine import Timing, VllmEngine
from dynamo_megatron.rollout.vllm.wire import SampleRequest, Sampling
from dynamo_megatron.types import GroupSizes, Prompt

MIB = 1 << 20
SEED = 0
STOP = 2
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
SYNC_WIDTHS = {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
SMALL_VOCAB = 275
SMALL_WIDTHS = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
}
STOPS_OF_SMALL = tuple(range(2, 8))


@contextmanager
def tier(model_dir: Path, **changes: Any) -> Iterator[VllmEngine]:
    """A tier, closed at the end and after any failure."""
    engine = build_vllm_engine(spec_of(model_dir, **changes))
    try:
        yield engine
    finally:
        engine.close()


def spec_of(model_dir: Path, **changes: Any) -> VllmSpec:
    """The engine that all parts use, on whatever there is."""
    use_gpu = torch.cuda.is_available()
    values = {
        "dtype": "bfloat16" if use_gpu else "float32",
        "max_tokens": 64,
        "max_model_len": 192,
        "stop_token_ids": (STOP,),
        "use_gpu": use_gpu,
        "max_num_seqs": 64,
        "kv_cache_mib": 512 if use_gpu else 128,
        "load_weights": True,
    }
    return VllmSpec(model_dir=model_dir, **(values | changes))


def arithmetic(count: int) -> list[Prompt]:
    """Problems as in the quickstart."""
    source = ArithmeticSource(kind="arithmetic", split="train", num_problems=count, seed=SEED)
    problems = load_problems([source]).problems
    tokenizer = load_tokenizer(TINY_POLICY)
    found = tokenize_prompts(problems, tokenizer, template="chat", max_prompt_tokens=64).prompts
    return list(found)


def sizes_of(prompts: Sequence[Prompt], low: int, high: int) -> GroupSizes:
    """Group sizes as an allocator gives them: all between two bounds."""
    spread = high - low + 1
    sizes = tuple(low + 5 * place % spread for place in range(len(prompts)))
    return GroupSizes(prompt_ids=tuple(prompt.id for prompt in prompts), sizes=sizes)


# Weight sync.


def measure_sync(folder: Path, *, quick: bool) -> list[dict]:
    """One row a transport."""
    model_dir = folder / "model"
    layers, vocab = (2, 4_096) if quick else (8, 32_768)
    write_model(
        model_dir, family="qwen3", layers=layers, vocab=vocab, tied=True, widths=SYNC_WIDTHS
    )
    for name in TOKENIZER_FILES:
        shutil.copy(TINY_POLICY / name, model_dir)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    weights = {
        name: tensor.to(device)
        for path in sorted(model_dir.glob("*.safetensors"))
        for name, tensor in load_file(path).items()
    }
    transports = ["object_store", "gloo", *(["nccl"] if device == "cuda" else [])]
    return [sync_row(model_dir, name, weights, 3 if quick else 9) for name in transports]


def sync_row(
    model_dir: Path, transport: str, weights: dict[str, torch.Tensor], repetitions: int
) -> dict:
    """Median seconds of syncs and of copies, taken in turn."""
    source = torch.cat([tensor.cpu().view(-1).view(torch.uint8) for tensor in weights.values()])
    target = torch.empty_like(source)
    syncs, copies = [], []
    with tier(model_dir, transport=transport, dtype="bfloat16", bucket_mib=64) as engine:
        engine.load_weights(weights.items(), version=0)  # forms the group, touches all memory
        target.copy_(source)
        for version in range(1, repetitions + 1):
            begin = time.perf_counter()
            target.copy_(source)
            copies.append(time.perf_counter() - begin)
            begin = time.perf_counter()
            engine.load_weights(weights.items(), version=version)
            syncs.append(time.perf_counter() - begin)
    sync, copy = statistics.median(syncs), statistics.median(copies)
    size = source.numel() / MIB
    return {
        "transport": transport,
        "MiB": size,
        "rounds": repetitions,
        "sync s": sync,
        "fastest s": min(syncs),
        "sync MiB/s": size / sync,
        "copy MiB/s": size / copy,
        "ratio": sync / copy,
        "ratio of the fastest": min(syncs) / min(copies),
    }


# Throughput.


@dataclasses.dataclass(frozen=True)
class Turn:
    """One round of one side."""

    seconds: float
    cpu_seconds: float
    responses: list[tuple[int, ...]]

    @property
    def tokens(self) -> int:
        """Sampled tokens."""
        return sum(map(len, self.responses))


def measure_throughput(*, quick: bool) -> list[dict]:
    """One row: tokens per second of both, and their ratios over alternating rounds."""
    prompts = arithmetic(16 if quick else 64)
    sizes = sizes_of(prompts, 4, 12)
    rounds = 3 if quick else 9
    spec = spec_of(TINY_POLICY)
    pairs: list[tuple[Turn, Turn]] = []
    with tier(TINY_POLICY) as engine, bare_process(replica_settings(spec, None)) as bare:
        for step in range(-1, rounds):  # the first one warms both up
            turns = {}
            for name in ("bare", "tier") if step % 2 else ("tier", "bare"):
                turns[name] = (
                    bare_turn(bare, spec, prompts, sizes, step)
                    if name == "bare"
                    else tier_turn(engine, prompts, sizes, step)
                )
            if step >= 0:
                pairs.append((turns["tier"], turns["bare"]))
    speeds = [(a.tokens / a.seconds, b.tokens / b.seconds) for a, b in pairs]
    ratios = [a / b for a, b in speeds]
    cpu = [(a.tokens / a.cpu_seconds) / (b.tokens / b.cpu_seconds) for a, b in pairs]
    same = [x == y for a, b in pairs for x, y in zip(a.responses, b.responses, strict=True)]
    return [
        {
            "rounds": rounds,
            "responses": sizes.budget,
            "tokens": int(statistics.median(a.tokens for a, _ in pairs)),
            "tier tokens/s": statistics.median(a for a, _ in speeds),
            "bare tokens/s": statistics.median(b for _, b in speeds),
            "ratio": statistics.median(ratios),
            "lowest": min(ratios),
            "highest": max(ratios),
            "CPU ratio": statistics.median(cpu),
            "same responses": statistics.mean(same),
        }
    ]


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def tier_turn(engine: VllmEngine, prompts: list[Prompt], sizes: GroupSizes, step: int) -> Turn:
    """A round of the tier: this process and its replicas."""
    pids = [
        os.getpid(),
        *(replica.facts.process.pid for replica in engine._fleet.ready if replica.facts),
    ]
    cpu, begin = sum(map(cpu_seconds, pids)), time.perf_counter()
    rollouts = engine.generate(prompts, sizes, step=step, temperature=1.0, seed=SEED)
    seconds = time.perf_counter() - begin
    return Turn(
        seconds, sum(map(cpu_seconds, pids)) - cpu, [rollout.token_ids for rollout in rollouts]
    )


def bare_turn(
    bare: Any, spec: VllmSpec, prompts: list[Prompt], sizes: GroupSizes, step: int
) -> Turn:
    """The same of bare vLLM."""
    requests = [
        SampleRequest(
            key=f"{prompt.id}/{k}",
            token_ids=prompt.token_ids,
            seed=rollout_seed(SEED, step, prompt.id, k),
        )
        for prompt, size in zip(prompts, sizes.sizes, strict=True)
        for k in range(size)
    ]
    bare.send((requests, Sampling(temperature=1.0, max_tokens=spec.max_tokens, version=0)))
    return Turn(*answer(bare))


# Idle places.


def measure_idle(folder: Path, *, quick: bool) -> list[dict]:
    """One row for the tier, one for static splitting; the same requests and seeds."""
    if torch.cuda.is_available() and torch.cuda.device_count() < 2:
        return []
    prompts = arithmetic(12 if quick else 24)
    sizes = sizes_of(prompts, 4, 12)
    rounds, places = (2 if quick else 7), 8
    model_dir = folder / "model"
    write_model(
        model_dir, family="qwen3", layers=4, vocab=SMALL_VOCAB, tied=False, widths=SMALL_WIDTHS
    )
    for name in TOKENIZER_FILES:
        shutil.copy(TINY_POLICY / name, model_dir)
    shape = {"replicas": 2, "max_num_seqs": places, "max_tokens": 192, "max_model_len": 256}
    with tier(model_dir, **shape, stop_token_ids=STOPS_OF_SMALL) as engine:
        # A window without end gives each replica its half at once.
        static = VllmEngine(
            engine._fleet,
            dataclasses.replace(engine._settings, window=sizes.budget),
            model_dir=str(model_dir),
        )
        engines = {"tier": engine, "static": static}
        found: dict[str, list[list[Timing]]] = {name: [] for name in engines}
        for step in range(-1, rounds):
            for name in ("tier", "static") if step % 2 else ("static", "tier"):
                engines[name].generate(prompts, sizes, step=step, temperature=1.0, seed=SEED)
                if step >= 0:
                    found[name].append(engines[name].timings)
    return [
        idle_row(name, timings, places, sizes.budget, rounds) for name, timings in found.items()
    ]


def idle_row(
    name: str, rounds_of: list[list[Timing]], places: int, responses: int, rounds: int
) -> dict:
    """Means over the rounds."""
    lengths = sorted(timing.tokens for timings in rounds_of for timing in timings)
    shares = [idle_shares(timings, places) for timings in rounds_of]
    return {
        "split": name,
        "rounds": rounds,
        "responses": responses,
        "median tokens": statistics.median(lengths),
        "90 % below": lengths[9 * len(lengths) // 10],
        "longest": lengths[-1],
        "idle until last start": statistics.mean(share[0] for share in shares),
        "highest": max(share[0] for share in shares),
        "idle of all": statistics.mean(share[1] for share in shares),
    }


def idle_shares(timings: Sequence[Timing], places: int) -> tuple[float, float]:
    """Empty places of all replicas: until the last request starts, and until the last one ends.

    A replica takes requests up before it has a place for them; a place is filled when one is free.
    """
    spans: list[tuple[float, float]] = []
    replicas = sorted({timing.replica for timing in timings})
    for replica in replicas:
        mine = sorted(
            (timing for timing in timings if timing.replica == replica),
            key=lambda timing: (timing.started_s, timing.finished_s),
        )
        free = [0.0] * places
        # A place's next owner is the one taken up first; its own end frees the place again.
        for timing in mine:
            start = max(timing.started_s, heapq.heappop(free))
            spans.append((min(start, timing.finished_s), timing.finished_s))
            heapq.heappush(free, timing.finished_s)
    begin = min(start for start, _ in spans)
    shares = []
    for end in (max(start for start, _ in spans), max(end for _, end in spans)):
        busy = sum(max(0.0, min(stop, end) - start) for start, stop in spans)
        shares.append(1.0 - busy / (len(replicas) * places * (end - begin)))
    return shares[0], shares[1]


def show(title: str, rows: list[dict]) -> None:
    """Print the rows."""
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=140).print(table)


def main() -> None:
    """Measure, print, and write the same figures as JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model, few rounds")
    parser.add_argument("--part", choices=("sync", "throughput", "idle"), help="one of the three")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    figures: dict[str, list[dict]] = {}
    parts = [options.part] if options.part else ["sync", "throughput", "idle"]
    for part in parts:
        if part == "sync":
            with tempfile.TemporaryDirectory() as folder:
                figures[part] = measure_sync(Path(folder), quick=options.quick)
        elif part == "throughput":
            figures[part] = measure_throughput(quick=options.quick)
        else:
            with tempfile.TemporaryDirectory() as folder:
                figures[part] = measure_idle(Path(folder), quick=options.quick)
    for part, rows in figures.items():
        if rows:
            show(part, rows)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
