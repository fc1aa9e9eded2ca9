"""Options of ``dynamo-megatron eval``."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Sequence
from pathlib import Path

_ABOUT = """\
Sample answers to problems, verify them and say how good the model is: pass@1, unbiased pass@k,
majority vote, each with a 95 % interval; lengths, truncation, verifier errors apart.
"""
_EXAMPLES = """\
examples:
  the model that ships, on its own task:
    dynamo-megatron eval builtin:tiny --data arithmetic:200 --samples 8 --max-tokens 64
  a model folder on two files, asked for a format:
    dynamo-megatron eval /models/Qwen3-0.6B --data aime.json math.parquet --samples 16 \\
        --temperature 0.6 --max-tokens 8192 --append 'Put the final answer within \\boxed{}.'
  once, with the most likely token each time:
    dynamo-megatron eval runs/mine/hf/step_000200 --data gsm8k.json --greedy

data: .jsonl and .json with problem and answer, .parquet (problem and answer, or prompt messages and
  reward_model.ground_truth), folders of a data set on disk, arithmetic:COUNT,
  reasoning_gym:TASK:COUNT (with --verifier reasoning_gym). Every file, or data_source that its
  records name, is a source with a row of its own. A problem that comes again in a source is left
  out and counted; one that several sources hold is sampled for each, and the row over all of them
  counts it once, in the first.

verdicts: a sample is right from a reward of --right-from. A failed verification is in no rate. In
  the majority vote all right samples are one answer; wrong ones are one answer where they are the
  same number (1/2, 0.50, \\frac12), or the same text but for spacing, $, \\text{} and \\left.

output, under --out:
  index.html           to read: filter by wrong, right, error; search
  samples.jsonl        every generation with its verdict, appended as they come
  summary.json         the figures; plots/ has pictures of them

The same command goes on where it stopped, unless the model folder or the verifier's file has other
content by then; --samples, --data and --limit may grow, --right-from may change. One evaluation at
a time writes into a folder. Greedy and sampled runs repeat: a sample depends on the weights,
--seed, the problem and its number alone.

exit status: 0, 1 (also where not one sample could be verified), 2 for what cannot be used, 130.
"""


_OPTION_OF_KEY = {
    "rollout.vllm.replicas": "--replicas",
    "rollout.vllm.tensor": "--tensor-parallel",
    "rollout.vllm.max_num_seqs": "--batch-size",
    "rollout.vllm.kv_cache_mib": "--kv-cache-mib",
    "rollout.max_tokens": "--max-tokens",
    "data.max_prompt_tokens": "--max-prompt-tokens",
}
"""Options by the keys that a run's configuration has for the same."""


def as_options(message: str) -> str:
    """A message of the rollout tier, in the words of this command."""
    for key, option in _OPTION_OF_KEY.items():
        message = re.sub(rf"{re.escape(key)}(?![a-z_])", option, message)
    return message


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options as they were given; what makes no sense ends the process with a message."""
    parser = argparse.ArgumentParser(
        prog="dynamo-megatron eval",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", help="a Hugging Face model folder, or builtin:tiny")
    add("--data", nargs="+", required=True, metavar="FILE", help="problems (see below)")
    add("--samples", type=_positive, default=1, metavar="K", help="of each problem (1)")
    add("--temperature", type=_above_zero, default=1.0, help="of the sampled policy (1.0)")
    add("--greedy", action="store_true", help="the most likely token each time, once")
    add("--max-tokens", type=_positive, default=1024, help="longest response (1024)")
    add("--max-prompt-tokens", type=_positive, default=1024, help="longer prompts are left out")
    add("--seed", type=_seed, default=0, help="fixes every sample (0)")
    add("--limit", type=_positive, help="only the first so many problems of each file")
    add("--append", default="", metavar="TEXT", help="put under every problem")
    add("--template", choices=("chat", "raw"), default="chat", help="chat template or plain text")
    add(
        "--verifier",
        default="math",
        help="math, integer_answer, reasoning_gym or your module:function (math)",
    )
    add(
        "--right-from",
        type=_finite,
        default=0.5,
        metavar="REWARD",
        help="a sample with this reward or more is right (0.5)",
    )
    add("--verifier-timeout", type=_above_zero, default=10.0, metavar="SECONDS")
    add("--workers", type=_positive, default=1, help="processes that verify (1)")
    add("--engine", default="hf", help="what generates: hf, or vllm in processes of its own (hf)")
    add("--batch-size", type=_positive, default=64, help="sequences a replica decodes at once (64)")
    add("--replicas", type=_positive, default=1, metavar="N", help="copies of the model (1)")
    add(
        "--tensor-parallel",
        type=_positive,
        default=1,
        metavar="N",
        help="GPUs or processes of each copy (1); engine hf has one copy in one process",
    )
    add(
        "--kv-cache-mib",
        type=_positive,
        metavar="MIB",
        help="of each copy, engine vllm (what a GPU has left; 256 without a GPU)",
    )
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights")
    add("--out", type=Path, help="folder of the results (evaluations/MODEL)")
    arguments = parser.parse_args(argv)
    _require_sense(parser, arguments)
    return arguments


def _require_sense(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuse options that do not go together."""
    if arguments.greedy and arguments.samples > 1:
        parser.error(
            f"--greedy --samples {arguments.samples}: greedy samples of a problem are all the "
            "same. Leave one of the two out."
        )
    if arguments.engine == "vllm" and not arguments.greedy:
        from dynamo_megatron.rollout.vllm.limits import check_temperature

        try:
            check_temperature("--temperature", arguments.temperature)
        except ValueError as error:
            parser.error(str(error))


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def _seed(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is negative")
    return value


def _above_zero(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0 (for greedy decoding: --greedy)")
    return value


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text} is no finite reward")
    return value
