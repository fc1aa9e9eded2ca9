"""Token statistics on one GPU: right, how fast, how close to the memory's speed, how much memory.

One GPU plays one tensor-parallel rank's shard of [T, V / tp]; nothing is communicated. It checks
against float64, sweeps block sizes, and prints milliseconds, achieved bandwidth and its share of
the copy bandwidth of the same run, and held and peak bytes, beside the usual implementation, a
`torch.compile`d dense one, and Liger's cross-entropy where it is installed.

    python benchmarks/token_stats_gpu.py [--tokens 8192] [--vocab 152064] [--tp 8] [--json FILE]
    python benchmarks/token_stats_gpu.py --smoke      # tiny, on a CPU in Triton's interpreter
"""

import argparse
import importlib.util
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

if "--smoke" in sys.argv:  # before Triton's kernels are imported
    os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor
from usual_stats import usual_stats, usual_stats_with_q

from dynamo_megatron.kernels import token_stats, token_stats_linear
from dynamo_megatron.kernels.shard import VocabShard
from dynamo_megatron.kernels.triton_engine import (
    triton_finish,
    triton_gradient,
    triton_partials,
)

TEMPERATURE = 0.9
FORWARD_SWEEP = [(1024, 4), (2048, 4), (2048, 8), (4096, 8), (4096, 16), (8192, 8), (8192, 16)]
GRADIENT_SWEEP = [(1024, 4), (2048, 4), (4096, 4), (4096, 8), (8192, 8), (8192, 16)]


@dataclass(frozen=True)
class Case:
    """One shard's problem."""

    logits: Tensor
    targets: Tensor
    weight: Tensor
    iterations: int

    @property
    def columns(self) -> int:
        """Local vocabulary."""
        return self.logits.shape[1]

    @property
    def elements(self) -> int:
        """Logits."""
        return self.logits.numel()

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.logits.device


def milliseconds(call: Callable[[], object], case: Case) -> float:
    """Median time of one call, by events on a GPU."""
    if case.device.type == "cpu":
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    for _ in range(3):
        call()
    pairs = []
    for _ in range(case.iterations):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        pairs.append((begin, end))
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs)


def copy_bandwidth(case: Case) -> float:
    """Bytes a second of a plain copy of the logits, read and write counted."""
    target = torch.empty_like(case.logits)
    seconds = milliseconds(lambda: target.copy_(case.logits), case) / 1e3
    return 2 * case.logits.nbytes / seconds


def check(case: Case) -> dict:
    """Largest errors against float64 on some rows, through the public op, in place."""
    rows = min(64, case.logits.shape[0])
    logits, targets = case.logits[:rows].clone(), case.targets[:rows]
    z = logits.double() / TEMPERATURE
    log_pi = z.log_softmax(-1)
    pi = log_pi.exp()
    entropy = -(pi * log_pi).sum(-1)
    centred = log_pi + entropy[:, None]
    want = {
        "logp": log_pi.gather(1, targets[:, None])[:, 0],
        "entropy": entropy,
        "q": (pi.square() * centred).sum(-1),
    }
    one_hot = torch.nn.functional.one_hot(targets, case.columns).double()
    want_grad = (one_hot - pi - 0.1 * pi * centred) / TEMPERATURE

    leaf = logits.requires_grad_()
    got = token_stats(
        leaf * 1, targets, temperature=TEMPERATURE, vocab_size=case.columns, impl="triton"
    )
    (got.logp.sum() + 0.1 * got.entropy.sum()).backward()
    errors = {
        n: float((getattr(got, n).detach().double() - w).abs().max()) for n, w in want.items()
    }
    # One bfloat16 ulp of the largest entry, 1 / 0.9, is 2^-7.
    errors["gradient"] = float((leaf.grad.double() - want_grad).abs().max())
    bounds = {"logp": 8e-6, "entropy": 8e-6, "q": 4e-6, "gradient": 2.0**-7}
    return {"kind": "check", **errors, "passed": all(errors[n] <= b for n, b in bounds.items())}


def check_fused_head(case: Case, width: int) -> dict:
    """The fused head's gradients (16-bit factors, float32 sum) against float64 on some rows."""
    tokens, columns = min(64, case.logits.shape[0]), min(2048, case.columns)
    hidden, head = _head(case, width, columns)
    hidden, targets = hidden[:tokens].detach().requires_grad_(), case.targets[:tokens] % columns
    head.main_grad = torch.zeros(head.shape, device=case.device)
    got = token_stats_linear(
        hidden, head, targets, vocab_size=columns, token_chunk=tokens // 2, impl="triton"
    )
    got.logp.sum().backward()
    z = (hidden.detach() @ head.detach().t()).double()
    grad = torch.nn.functional.one_hot(targets, columns).double() - z.softmax(-1)
    want = grad.t() @ hidden.detach().double()
    error = float((head.main_grad.double() - want).abs().max() / want.abs().max())
    return {"kind": "check head", "weight_gradient_relative": error, "passed": error < 1e-2}


def sweep(case: Case, bandwidth: float) -> list[dict]:
    """Both kernels over block sizes and warps."""
    tokens, columns = case.logits.shape
    shard = VocabShard(0, columns, columns, None)
    inv = torch.full((tokens,), 1 / TEMPERATURE, dtype=torch.float64, device=case.device)
    parts = triton_partials(case.logits, case.targets, inv, shard, need_q=True)[None]
    _, state = triton_finish(parts, case.targets, inv)
    interpreted = case.device.type == "cpu"
    out, g = torch.empty_like(case.logits), case.weight
    rows = []

    def record(kernel: str, block: int, warps: int, time_ms: float, moved: int) -> None:
        rate = moved / time_ms * 1e3
        rows.append(
            {
                "kind": "sweep",
                "kernel": kernel,
                "block": block,
                "warps": warps,
                "ms": time_ms,
                "TB/s": rate / 1e12,
                "of_copy": rate / bandwidth,
            }
        )

    for block, warps in FORWARD_SWEEP[:1] if interpreted else FORWARD_SWEEP:
        for need_q in (True, False):
            call = partial(
                triton_partials,
                *(case.logits, case.targets, inv, shard),
                need_q=need_q,
                block=block,
                warps=warps,
            )
            name = "forward" if need_q else "forward, no Q"
            record(name, block, warps, milliseconds(call, case), case.logits.nbytes)
    for block, warps in GRADIENT_SWEEP[:1] if interpreted else GRADIENT_SWEEP:
        call = partial(
            triton_gradient,
            *(case.logits, out, case.targets, inv, state, shard, g, g),
            block=block,
            warps=warps,
        )
        record("gradient", block, warps, milliseconds(call, case), 2 * case.logits.nbytes)
    call = partial(triton_finish, parts, case.targets, inv)
    record("finish", 128, 4, milliseconds(call, case), parts.nbytes + 8 * 4 * tokens)
    return rows


def dense(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """What one would write for `torch.compile`."""
    log_pi = (logits.float() / TEMPERATURE).log_softmax(-1)
    logp = log_pi.gather(1, targets[:, None])[:, 0]
    return logp, -(log_pi.exp() * log_pi).sum(-1)


def contenders(case: Case) -> dict[str, Callable[[Tensor, Tensor], tuple]]:
    """Implementations by name; each returns differentiable (logp, entropy or None)."""

    def ours(impl: str, need_q: bool = True, inplace: bool = True):
        def run(logits, targets):
            stats = token_stats(
                logits,
                targets,
                temperature=TEMPERATURE,
                vocab_size=case.columns,
                need_q=need_q,
                inplace_backward=inplace,
                impl=impl,
            )
            return stats.logp, stats.entropy

        return run

    ways = {
        "token_stats triton (H, Q)": ours("triton"),
        "token_stats triton, no Q": ours("triton", need_q=False),
        "token_stats triton, out of place": ours("triton", inplace=False),
        "token_stats torch": ours("torch"),
        "usual, float32": lambda z, y: usual_stats(z, y, temperature=TEMPERATURE),
        "usual, own dtype": lambda z, y: usual_stats(z, y, temperature=TEMPERATURE, upcast=False),
        "usual + Q bolted on": lambda z, y: usual_stats_with_q(z, y, temperature=TEMPERATURE)[:2],
    }
    if case.device.type == "cuda":
        ways["dense, torch.compile (no Q)"] = torch.compile(dense)
        if importlib.util.find_spec("liger_kernel") is not None:
            from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

            def liger(logits, targets):
                scaled = logits / TEMPERATURE
                arguments = (None, -100, 0.0, 0.0, "none")
                return -LigerCrossEntropyFunction.apply(scaled, targets, *arguments)[0], None

            ways["Liger cross-entropy (logp only)"] = liger
    return ways


def compare(case: Case) -> list[dict]:
    """Forward, forward and backward, held and peak bytes of every implementation."""
    rows = []
    for name, way in contenders(case).items():

        def step(way=way):
            logits = case.logits.requires_grad_() * 1  # a copy: the gradient may take its place
            logp, entropy = way(logits, case.targets)
            loss = (logp * case.weight).sum()
            loss = loss if entropy is None else loss - 0.01 * entropy.sum()
            torch.autograd.grad(loss, logits)

        def forward(way=way):
            with torch.no_grad():
                way(case.logits, case.targets)

        row = {"kind": "compare", "name": name}
        try:
            row["forward_ms"] = milliseconds(forward, case)
            copy_ms = milliseconds(lambda: case.logits * 1, case)
            row["step_ms"] = milliseconds(step, case) - copy_ms
            if case.device.type == "cuda":
                row |= memory(way, case)
        except (torch.cuda.OutOfMemoryError, RuntimeError, TypeError) as error:
            # A contender of another version, or one that does not fit, must not end the run.
            row["failed"] = f"{type(error).__name__}: {str(error)[:120]}"
        rows.append(row)
    return rows


def memory(way: Callable, case: Case) -> dict:
    """Held and peak bytes an element above the logits."""
    logits = case.logits.requires_grad_() * 1
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logp, entropy = way(logits, case.targets)
    held = torch.cuda.memory_allocated() - before
    loss = (logp * case.weight).sum()
    loss = loss if entropy is None else loss - 0.01 * entropy.sum()
    torch.autograd.grad(loss, logits)
    peak = torch.cuda.max_memory_allocated() - before
    return {"held_B_per_elt": held / case.elements, "peak_B_per_elt": peak / case.elements}


def _head(case: Case, width: int, columns: int) -> tuple[Tensor, Tensor]:
    """Hidden states and an LM head."""
    hidden = torch.randn(case.logits.shape[0], width, device=case.device)
    head = torch.randn(columns, width, device=case.device) * 0.05
    return (
        hidden.to(case.logits.dtype).requires_grad_(),
        head.to(case.logits.dtype).requires_grad_(),
    )


def compare_heads(case: Case, width: int) -> list[dict]:
    """LM head and statistics: materialised and fused."""
    hidden, head = _head(case, width, case.columns)
    rows = []

    def fused(chunk):
        stats = token_stats_linear(
            hidden,
            head,
            case.targets,
            temperature=TEMPERATURE,
            vocab_size=case.columns,
            token_chunk=chunk,
            impl="triton",
        )
        return stats.logp, stats.entropy

    ways = {"head + token_stats": None, "head + usual, float32": None}
    every = contenders(case)
    ways["head + token_stats"] = lambda: every["token_stats triton (H, Q)"](
        hidden @ head.t(), case.targets
    )
    ways["head + usual, float32"] = lambda: every["usual, float32"](hidden @ head.t(), case.targets)
    tokens = case.logits.shape[0]
    for chunk in sorted({max(tokens // 8, 1), max(tokens // 2, 1)}):
        ways[f"token_stats_linear, {chunk} tokens a chunk"] = lambda chunk=chunk: fused(chunk)
    for name, way in ways.items():

        def step(way=way):
            logp, entropy = way()
            loss = (logp * case.weight).sum() - 0.01 * entropy.sum()
            torch.autograd.grad(loss, (hidden, head))

        row = {"kind": "head", "name": name}
        if case.device.type == "cuda":
            step()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step()
            row["peak_MiB"] = (torch.cuda.max_memory_allocated() - before) / 2**20
        row["step_ms"] = milliseconds(step, case)
        row["useful_TFLOP/s"] = 6 * tokens * width * case.columns / row["step_ms"] / 1e9
        rows.append(row)
    return rows


def show(row: dict) -> None:
    """One line."""
    print("  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()))


def main() -> int:
    """Run everything; the exit status says whether the checks passed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocab", type=int, default=152_064)
    parser.add_argument("--tp", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=5120)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--smoke", action="store_true", help="tiny, on a CPU, interpreted")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.tokens, arguments.vocab, arguments.tp = 6, 512, 2
        arguments.hidden, arguments.iterations = 16, 1
        torch.set_num_threads(1)
    elif not torch.cuda.is_available():
        parser.error("no CUDA device: run it on a GPU, or with --smoke")
    device = torch.device("cpu" if arguments.smoke else "cuda")
    torch.manual_seed(0)
    columns = arguments.vocab // arguments.tp
    case = Case(
        logits=(torch.randn(arguments.tokens, columns, device=device) * 3).bfloat16(),
        targets=torch.randint(0, columns, (arguments.tokens,), device=device),
        weight=torch.randn(arguments.tokens, device=device),
        iterations=arguments.iterations,
    )
    bandwidth = copy_bandwidth(case)
    name = "interpreter" if arguments.smoke else torch.cuda.get_device_name()
    rows = [
        {
            "kind": "run",
            "device": name,
            "tokens": arguments.tokens,
            "columns": columns,
            "copy_TB/s": bandwidth / 1e12,
        }
    ]
    show(rows[0])
    checks = [check(case), check_fused_head(case, arguments.hidden)]
    for part in (
        checks,
        sweep(case, bandwidth),
        compare(case),
        compare_heads(case, arguments.hidden),
    ):
        for row in part:
            show(row)
        rows += part
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))
    return int(not all(row["passed"] for row in checks))


if __name__ == "__main__":
    raise SystemExit(main())
