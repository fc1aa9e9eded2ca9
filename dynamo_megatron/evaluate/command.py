"""``dynamo-megatron eval MODEL --data FILES --samples K``."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dynamo_megatron.evaluate.build import EvaluationProblems

FAILED, USAGE_ERROR, INTERRUPTED = 1, 2, 130

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
  reasoning_gym:TASK:COUNT (with --verifier reasoning_gym)

output, under --out:
  index.html           to read: filter by wrong, right, error; search
  samples.jsonl        every generation with its verdict, appended as they come
  summary.json         the figures; plots/ has pictures of them

The same command goes on where it stopped; --samples, --data and --limit may grow. Greedy and
sampled runs repeat: a sample depends on the weights, --seed, the problem and its number alone.
"""

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run an evaluation from the command line.

    Returns:
        0 when it is complete, 2 when the arguments or the data cannot be used, 130 when it was
        interrupted, 1 after another error.
    """
    arguments = _parse(argv)
    # torch takes seconds to import; a typo is answered before that.
    from transformers.utils.logging import disable_progress_bar

    from dynamo_megatron.observe.logging import setup_logging
    from dynamo_megatron.reward.pool import RewardError
    from dynamo_megatron.rollout.errors import RolloutError

    setup_logging(rank=0)
    disable_progress_bar()  # transformers' own, of loading weights
    try:
        with _terminable():
            _run(arguments)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"dynamo-megatron eval: {error}\n")
        return USAGE_ERROR
    except (RolloutError, RewardError) as error:
        sys.stderr.write(f"dynamo-megatron eval: {error}\n")
        return FAILED
    except KeyboardInterrupt:
        sys.stderr.write("stopped; the same command goes on from here\n")
        return INTERRUPTED
    return 0


@contextmanager
def _terminable() -> Iterator[None]:
    """Have SIGTERM end the evaluation as Ctrl-C does: engines and their files are cleared away."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
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
    add("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights")
    add("--out", type=Path, help="folder of the results (evaluations/MODEL)")
    arguments = parser.parse_args(argv)
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
    return arguments


def _run(arguments: argparse.Namespace) -> None:
    from rich.console import Console

    from dynamo_megatron.assets import model_folder
    from dynamo_megatron.evaluate.build import (
        EngineSpec,
        build_engine,
        build_reward,
        load_evaluation_problems,
        longest_sequence,
    )
    from dynamo_megatron.evaluate.report import (
        PAGE_NAME,
        results_table,
        write_report,
        write_summary,
    )
    from dynamo_megatron.evaluate.run import Plan, evaluate
    from dynamo_megatron.evaluate.summary import summarise

    model_dir = model_folder(arguments.model)
    problems = load_evaluation_problems(
        arguments.data,
        model_dir,
        template=arguments.template,
        max_prompt_tokens=arguments.max_prompt_tokens,
        instruction=arguments.append,
        limit=arguments.limit,
    )
    logger.info(
        "%d problems; %d duplicates removed, %d too long left out",
        len(problems.prompts),
        problems.duplicates,
        problems.dropped,
    )
    out = arguments.out or Path("evaluations") / model_dir.name
    settings = _settings(arguments, model_dir)
    with ExitStack() as closing:
        reward = closing.enter_context(
            build_reward(
                arguments.verifier,
                workers=arguments.workers,
                timeout_s=arguments.verifier_timeout,
            )
        )
        as_text = reward.check(problems.prompts)
        spec = EngineSpec(
            model_dir=model_dir,
            max_tokens=arguments.max_tokens,
            max_model_len=longest_sequence(problems.prompts, arguments.max_tokens, model_dir),
            batch_size=arguments.batch_size,
            dtype=arguments.dtype,
            replicas=arguments.replicas,
            tensor_parallel=arguments.tensor_parallel,
        )
        engine = build_engine(arguments.engine, spec)
        closing.callback(engine.close)
        plan = Plan(
            prompts=problems.prompts,
            samples=arguments.samples,
            temperature=None if arguments.greedy else arguments.temperature,
            seed=arguments.seed,
            batch=arguments.batch_size * arguments.replicas,
            labels=problems.labels,
        )
        samples = evaluate(plan, engine, reward, out, settings)
    summaries = summarise(samples, seed=arguments.seed)
    title = arguments.model
    facts = _facts(problems, [prompt.id for prompt in as_text])
    write_summary(out, title=title, settings=settings, facts=facts, summaries=summaries)
    write_report(out, title=title, settings=settings, summaries=summaries, samples=samples)
    Console().print(results_table(summaries))
    sys.stdout.write(f"{out / PAGE_NAME}\n")


def _settings(arguments: argparse.Namespace, model_dir: Path) -> dict[str, Any]:
    """All that decides what a sample is, but the problems and how many samples there are."""
    from dynamo_megatron.evaluate.build import weights_fingerprint

    return {
        "model": arguments.model,
        "weights": weights_fingerprint(model_dir),
        "temperature": None if arguments.greedy else arguments.temperature,
        "max_tokens": arguments.max_tokens,
        "seed": arguments.seed,
        "template": arguments.template,
        "append": arguments.append,
        "verifier": arguments.verifier,
        "engine": arguments.engine,
        "dtype": arguments.dtype,
    }


def _facts(problems: EvaluationProblems, as_text: Sequence[str]) -> dict[str, Any]:
    return {
        "duplicates_removed": problems.duplicates,
        "too_long_left_out": problems.dropped,
        "references_compared_as_text": list(as_text),
    }


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
