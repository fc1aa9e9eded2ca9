"""Throughput and memory of conversion, beside a plain read and write of the same bytes.

    python benchmarks/convert.py [--quick] [--json FILE]
    python benchmarks/convert.py --memory [--quick] [--json FILE]

The first writes a synthetic bfloat16 model of 1 GiB (Qwen2, tied) to a temporary folder, and
converts it to a checkpoint and back. "plain" is ``safetensors`` reading all files and writing them
again, in the same run, fsync inside as it is in the conversions. "share" is plain's time over the
conversion's: 1 would be as fast as copying. The self-check, which every conversion makes, is
timed beside it. Times vary with the disk; the share is of one run, and the best of some repetitions
(the page cache is warm in all of them).

``--memory`` converts models of a 14B's widths (hidden size 5120, MLP 17408, 40 heads) at two depths
and prints the peak of the memory that is the process's own (anonymous, not the page cache). With
``--quick`` the depths are 2 and 4 and the vocabulary is small.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

import megatron_patches

ROOT = Path(__file__).parents[1]
GIB = 2**30
WIDTHS_14B = {
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
WIDTHS_1GIB = {
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
}
WIDTHS_SMALL = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}


def write_model(folder: Path, *, family: str, layers: int, vocab: int, tied: bool, widths: dict):
    """A random bfloat16 model, streamed to disk."""
    from dynamo_megatron.hf.architecture import read_architecture
    from dynamo_megatron.hf.families import FAMILIES
    from dynamo_megatron.hf.mapping import hf_shapes
    from dynamo_megatron.hf.writer import SafetensorsWriter

    folder.mkdir(parents=True)
    config = {
        "model_type": family,
        "architectures": [FAMILIES[family].causal_lm],
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "max_position_embeddings": 4096,
        "rope_theta": 1e6,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "dtype": "bfloat16",
        **widths,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    shapes = hf_shapes(read_architecture(folder))
    # A pool of random numbers, repeated: drawing 1 GiB would take longer than converting it. Its
    # length is prime, so no two rows are alike.
    pool = torch.randn(1_000_003, generator=torch.Generator().manual_seed(0)) * 0.02
    with SafetensorsWriter(folder, shapes, dtype=torch.bfloat16, shard_bytes=GIB // 2) as writer:
        for name, shape in shapes.items():
            count = torch.Size(shape).numel()
            tensor = pool.bfloat16().repeat(-(-count // len(pool)))[:count].view(shape)
            writer.add(name, tensor + 1 if "norm" in name else tensor)
        writer.close()


def plain_copy(source: Path, out: Path) -> float:
    """Seconds to read all tensors and write them again, until they are on disk."""
    out.mkdir()
    started = time.perf_counter()
    for path in sorted(source.glob("*.safetensors")):
        save_file(load_file(path), out / path.name)
        descriptor = os.open(out / path.name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    seconds = time.perf_counter() - started
    shutil.rmtree(out)
    return seconds


class PeakMemory:
    """Largest anonymous memory of this process while the block runs, sampled every 5 ms."""

    def __enter__(self) -> PeakMemory:
        self.bytes = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.005):
            self.bytes = max(self.bytes, anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def anonymous_bytes() -> int:
    """Memory that belongs to this process alone: no mapped files."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no RssAnon: memory is measured on Linux only.")


def measure_speed(folder: Path, *, quick: bool) -> list[dict]:
    """One row a direction."""
    from dynamo_megatron.convert.conversion import to_hf, to_megatron

    widths = WIDTHS_SMALL if quick else WIDTHS_1GIB
    source = folder / "source"
    layers, vocab = (4, 4096) if quick else (10, 32_768)
    write_model(source, family="qwen2", layers=layers, vocab=vocab, tied=True, widths=widths)
    best: dict[str, dict] = {}
    plain = float("inf")
    for _ in range(2 if quick else 3):
        plain = min(plain, plain_copy(source, folder / "copy"))
        for name, convert, given in (
            ("to-megatron", to_megatron, source),
            ("to-hf", to_hf, folder / "to-megatron"),
        ):
            shutil.rmtree(folder / name, ignore_errors=True)
            with PeakMemory() as peak:
                done = convert(given, folder / name)
            row = {
                "name": name,
                "gib": done.num_bytes / GIB,
                "seconds": done.seconds,
                "check_s": done.check_seconds,
                "peak_gib": peak.bytes / GIB,
                "max_logit_difference": done.check.max_logit_difference,
            }
            if name not in best or row["seconds"] < best[name]["seconds"]:
                best[name] = row
    for row in best.values():
        row |= {"plain_s": plain, "share": plain / row["seconds"]}
    return list(best.values())


def measure_memory(folder: Path, *, quick: bool) -> list[dict]:
    """One row a depth and direction, each in a process of its own."""
    rows = []
    for layers in (2, 4) if quick else (8, 16):
        source, there, back = (folder / name for name in ("source", "there", "back"))
        vocab = 8_192 if quick else 151_936
        write_model(
            source, family="qwen3", layers=layers, vocab=vocab, tied=False, widths=WIDTHS_14B
        )
        for direction, given, out in (("to_megatron", source, there), ("to_hf", there, back)):
            done = subprocess.run(
                [sys.executable, __file__, "--one", direction, str(given), str(out)],
                capture_output=True,
                text=True,
                check=False,
                cwd=ROOT,
            )
            if done.returncode:
                raise RuntimeError(done.stderr)
            rows.append({"layers": layers, **json.loads(done.stdout.splitlines()[-1])})
            shutil.rmtree(given)
        shutil.rmtree(back)
    return rows


def convert_one(direction: str, given: Path, out: Path) -> None:
    """One conversion, its figures as JSON on standard output."""
    from dynamo_megatron.convert import conversion

    before = anonymous_bytes()
    with PeakMemory() as peak:
        done = getattr(conversion, direction)(given, out)
    figures = {
        "name": direction.replace("_", "-"),
        "gib": done.num_bytes / GIB,
        "seconds": done.seconds,
        "check_s": done.check_seconds,
        "start_gib": before / GIB,
        "peak_gib": peak.bytes / GIB,
        "max_logit_difference": done.check.max_logit_difference,
    }
    sys.stdout.write(json.dumps(figures) + "\n")


def show(rows: list[dict]) -> None:
    """Print the rows."""
    table = Table(title="conversion")
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(f"{v:.3g}" if isinstance(v, float) else str(v) for v in row.values()))
    Console(width=120).print(table)


def main() -> None:
    """Measure, print, and write the same figures as JSON when asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small model")
    parser.add_argument("--memory", action="store_true", help="peak memory against depth")
    parser.add_argument("--one", nargs=3, metavar=("DIRECTION", "IN", "OUT"), help="for --memory")
    parser.add_argument("--folder", type=Path, help="where the models go (default: a new one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here too")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    megatron_patches.apply()
    if options.one:
        direction, given, out = options.one
        convert_one(direction, Path(given), Path(out))
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        measure = measure_memory if options.memory else measure_speed
        rows = measure(Path(folder), quick=options.quick)
    show(rows)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
