"""The command line: ``dynamo-megatron`` and ``python -m dynamo_megatron.train``.

Nothing heavy is imported before the arguments and the configuration are known to be good: a typo
is answered at once, on one rank, without a traceback.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from dynamo_megatron import __version__
from dynamo_megatron.config import Config
from dynamo_megatron.config_keys import ConfigError, describe_config
from dynamo_megatron.load_config import load_config

USAGE_ERROR = 2
"""Exit code when the command line or the configuration cannot be used."""

_ABOUT = """\
DynaMO reinforcement learning with verifiable rewards on Megatron-Core.

Rollouts are allocated to prompts by the variance of their rewards, and token advantages are
modulated by entropy and its first-order change (arXiv:2602.19208).

commands:
  train    train a policy as a YAML file describes it
  config   print every configuration key with its type, default and meaning
  convert  between checkpoints and Hugging Face folders, each way, with a check of the result
  eval     pass@1, pass@k and majority vote of a model on problem files, with every sample to read
  compare  two evaluations of the same problems: by how much the one model is better
"""

_EXAMPLES = """\
examples:
  one process:
    {prog} --config configs/quickstart.yaml parallel.tensor=1
  two ranks, tensor parallel 2 (what tensor and pipeline leave over is data parallel):
    torchrun --standalone --nproc-per-node 2 -m dynamo_megatron.train \\
        --config configs/quickstart.yaml parallel.tensor=2
  other values: dotted keys, list items by index, null for nothing:
    {prog} --config configs/quickstart.yaml parallel.tensor=1 \\
        run.dir=runs/second optimizer.lr=3e-4 data.train.0.seed=9 algorithm.clip.dual=null

output, all under run.dir:
  plots/               overview.png: reward, entropy, group sizes, modulation, gradient norm
  metrics.jsonl        one JSON object a step; tensorboard/ has the same
  generations/         sampled responses with their verdicts; generations.md reads well
  evaluations/         held-out figures and responses, by step; index.html to read them
  checkpoints/         what run.resume=if_present goes on from
  hf/                  the final policy in Hugging Face format
  config.yaml          the configuration as it ran, every default filled in: --config takes it
  run.log              what rank 0 said

exit code: 0 done, 2 the command line or the configuration file is refused, else the run failed.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of ``dynamo-megatron``.

    Args:
        argv: arguments without the program's name; those of the process by default.

    Returns:
        The process's exit code.
    """
    parser = _Parser(
        prog="dynamo-megatron",
        description=_ABOUT,
        epilog=_EXAMPLES.format(prog="dynamo-megatron train"),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="dynamo-megatron [-h] [--version] {train,config,convert,eval,compare} ...",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = ("train", "config", "convert", "eval", "compare")
    parser.add_argument("command", choices=commands, help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.command == "config":
        return _print_config(arguments.rest)
    if arguments.command == "convert":
        from dynamo_megatron.convert import command

        return command.main(arguments.rest)
    if arguments.command == "eval":
        from dynamo_megatron.evaluate import command

        return command.main(arguments.rest)
    if arguments.command == "compare":
        from dynamo_megatron.evaluate import compare_command

        return compare_command.main(arguments.rest)
    config_from_arguments(arguments.rest, prog="dynamo-megatron train")
    # torch and Megatron-Core come in here, seconds later.
    from dynamo_megatron import train

    return train.main(arguments.rest)


def config_from_arguments(
    argv: Sequence[str] | None = None, *, prog: str = "python -m dynamo_megatron.train"
) -> Config:
    """The configuration that a training command line asks for.

    Args:
        argv: ``--config FILE [a.b=value ...]``; the process's arguments by default.
        prog: the program's name in help and errors.

    Raises:
        SystemExit: with 0 after ``--help``, with 2 when the command line or the configuration
            cannot be used. Rank 0 (by the environment's RANK) has then said why on stderr.
    """
    parser = _train_parser(prog)
    arguments, unknown = parser.parse_known_intermixed_args(argv)
    if unknown:
        parser.error(
            f"unrecognized arguments: {' '.join(unknown)}. Overrides are written without dashes: "
            "run.num_steps=100"
        )
    try:
        return load_config(arguments.config, arguments.overrides)
    except ConfigError as error:
        _say(f"{prog}: {error}")
        raise SystemExit(USAGE_ERROR) from None


class _Parser(argparse.ArgumentParser):
    """Says what is wrong with the arguments on rank 0 alone."""

    def error(self, message: str) -> NoReturn:
        if _is_rank_zero():
            super().error(message)
        self.exit(USAGE_ERROR)


class _HelpConfig(argparse.Action):
    """Prints the schema of the configuration and ends."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        sys.stdout.write(describe_config())
        parser.exit(0)


def _train_parser(prog: str) -> _Parser:
    parser = _Parser(
        prog=prog,
        description="Train a policy. One YAML file describes the whole run.",
        epilog=_EXAMPLES.format(prog=prog),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the run's YAML file")
    parser.add_argument(
        "--help-config",
        action=_HelpConfig,
        nargs=0,
        help="print every configuration key with its type, default and meaning",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="a.b=value",
        help="replace values of the file; the value is YAML",
    )
    return parser


def _print_config(argv: Sequence[str]) -> int:
    parser = _Parser(
        prog="dynamo-megatron config",
        description="Print every configuration key with its type, default and meaning.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--key", default="", metavar="PREFIX", help="only this key or section: algorithm.modulation"
    )
    try:
        sys.stdout.write(describe_config(parser.parse_args(argv).key).lstrip("\n"))
    except ConfigError as error:
        _say(f"{parser.prog}: {error}")
        return USAGE_ERROR
    return 0


def _is_rank_zero() -> bool:
    return os.environ.get("RANK", "0") in ("", "0")


def _say(message: str) -> None:
    if _is_rank_zero():
        sys.stderr.write(f"{message}\n")
