"""``dynamo-megatron convert to-hf | to-megatron``."""

from __future__ import annotations

import argparse
import logging
import math
import os
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo_megatron.assets import BUILTIN_MODELS, model_folder

if TYPE_CHECKING:
    from dynamo_megatron.convert.conversion import Conversion
    from dynamo_megatron.convert.self_check import CheckReport

FAILED = 1
"""Exit code of a conversion that could not be made, or did not pass its check."""

_EXAMPLES = """\
examples:
  dynamo-megatron convert to-hf runs/mine/checkpoints/step_00000200 exported
  dynamo-megatron convert to-hf CHECKPOINT exported --dtype bfloat16
  dynamo-megatron convert to-megatron /models/Qwen3-14B converted
  dynamo-megatron convert to-hf CHECKPOINT exported --check-only

One process on a CPU; one decoder layer is in memory at a time. Every conversion ends with a check
of all tensors, bit by bit, and of the logits of a probe batch in transformers and in
Megatron-Core. A conversion that fails leaves nothing behind. The check of a pair also
compares config.json, tokenizer, chat template and generation settings with what is converted.

exit code: 0 converted and checked, 1 not converted (or the pair differs), 2 wrong arguments,
130 interrupted.
"""


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Args:
        argv: arguments after ``convert``.

    Returns:
        The exit code.
    """
    arguments = _parser().parse_args(argv)
    # Conversion needs no GPU, and must not take Transformer Engine's layers where there is one.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with _Interruption() as interruption, _warnings_said():
        try:
            lines = _run(arguments, interruption)
        except KeyboardInterrupt:
            return _interrupted()
        except Exception as error:
            # torch and others turn an interruption into errors of their own.
            return _interrupted() if interruption.arrived else _failed(error)
    _print(lines)
    return 0


class _Interruption:
    """Ctrl-C and SIGTERM: remembered, and raised once, so that cleaning up is not interrupted."""

    def __init__(self) -> None:
        self.arrived = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> _Interruption:
        for number in (signal.SIGINT, signal.SIGTERM):
            # Ignored in a shell's background: it stays so.
            if signal.getsignal(number) != signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._arrive)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _arrive(self, *_: object) -> None:
        if not self.arrived:
            self.arrived = True
            raise KeyboardInterrupt

    def progress(self, items: Iterable) -> Iterator:
        """A bar; it ends where an interruption was lost on its way."""
        from tqdm import tqdm

        # None: only where standard error is a terminal.
        for item in tqdm(items, disable=None, leave=False):
            if self.arrived:
                raise KeyboardInterrupt
            yield item


@contextmanager
def _warnings_said() -> Iterator[None]:
    """Warnings of this package on standard error."""
    logger = logging.getLogger("dynamo_megatron")
    handler = logging.StreamHandler()
    handler.setLevel(logging.WARNING)
    handler.setFormatter(logging.Formatter("dynamo-megatron convert: warning: %(message)s"))
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _interrupted() -> int:
    _say("interrupted; nothing was left behind.")
    return 128 + signal.SIGINT


def _failed(error: Exception) -> int:
    from dynamo_megatron.checkpoint.errors import CheckpointError

    if not isinstance(error, (ValueError, CheckpointError, OSError)):
        raise error
    _say(str(error))
    return FAILED


def _run(arguments: argparse.Namespace, interruption: _Interruption) -> str:
    import megatron_patches

    megatron_patches.apply()
    import torch

    from dynamo_megatron.convert import conversion

    hf_out = arguments.direction == "to-hf"
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    source = arguments.source if hf_out else None
    if arguments.check_only:
        pair = (arguments.input, arguments.out) if hf_out else (arguments.out, arguments.input)
        report = conversion.check(
            *pair,
            written="hf" if hf_out else "megatron",
            source=source,
            dtype=dtype,
            progress=interruption.progress,
        )
        return _check_line(report)
    if hf_out:
        done = conversion.to_hf(
            arguments.input,
            arguments.out,
            source=source,
            dtype=dtype,
            shard_bytes=int(arguments.shard_gib * 2**30),
            progress=interruption.progress,
        )
    else:
        done = conversion.to_megatron(
            arguments.input, arguments.out, dtype=dtype, progress=interruption.progress
        )
    return _done_lines(done)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dynamo-megatron convert",
        description="Convert between Hugging Face folders and distributed checkpoints.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    directions = parser.add_subparsers(dest="direction", required=True, metavar="DIRECTION")
    to_hf = directions.add_parser("to-hf", help="checkpoint in, Hugging Face folder out")
    to_hf.add_argument("input", type=Path, metavar="CHECKPOINT", help="a folder step_...")
    to_hf.add_argument(
        "--source",
        type=_model_folder,
        metavar="DIR",
        help="Hugging Face folder with config.json and tokenizer (default: that in the checkpoint)",
    )
    to_hf.add_argument(
        "--shard-gib", type=_positive, default=5.0, help="largest file of weights (default: 5)"
    )
    to_megatron = directions.add_parser(
        "to-megatron", help="Hugging Face folder in, weights-only checkpoint out"
    )
    to_megatron.add_argument(
        "input", type=_model_folder, metavar="HF", help="a model folder, or builtin:tiny"
    )
    for direction in (to_hf, to_megatron):
        direction.add_argument("out", type=Path, metavar="OUT", help="new folder")
        direction.add_argument(
            "--dtype",
            choices=("float32", "bfloat16", "float16"),
            help="of the weights written (default: as they are; with --check-only: any)",
        )
        direction.add_argument(
            "--check-only", action="store_true", help="compare an existing pair, write nothing"
        )
    return parser


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a finite number above 0")
    return value


def _model_folder(text: str) -> Path:
    if text.startswith("builtin:") and text not in BUILTIN_MODELS:
        names = ", ".join(BUILTIN_MODELS)
        raise argparse.ArgumentTypeError(f"{text}: the built-in models are {names}")
    return model_folder(text)


def _done_lines(done: Conversion) -> str:
    gib = done.num_bytes / 2**30
    rate = f"{gib:.2f} GiB in {done.seconds:.1f} s"
    return f"{done.out}: {rate}, checked in {done.check_seconds:.1f} s\n{_check_line(done.check)}"


def _check_line(report: CheckReport) -> str:
    return (
        f"{report.num_tensors} tensors equal bit by bit; logits of transformers and Megatron-Core "
        f"differ by at most {report.max_logit_difference:.2e} (largest logit "
        f"{report.max_logit:.3g})"
    )


def _print(text: str) -> None:
    sys.stdout.write(f"{text}\n")


def _say(text: str) -> None:
    sys.stderr.write(f"dynamo-megatron convert: {text}\n")
