"""``dynamo-megatron eval MODEL --data FILES --samples K``."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dynamo_megatron.evaluate.options import as_options, parse

if TYPE_CHECKING:
    from dynamo_megatron.evaluate.build import EvaluationProblems
    from dynamo_megatron.evaluate.samples import Sample, SampleFile
    from dynamo_megatron.types import Prompt

FAILED, USAGE_ERROR, INTERRUPTED = 1, 2, 130

_MESSAGES_SHOWN = 3
_MESSAGE_LENGTH = 200

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    """Run an evaluation from the command line.

    Returns:
        0 when it is complete, 2 when the arguments or the data cannot be used, 130 when it was
        interrupted, 1 after another error, and where not one sample could be verified (what there
        is, is written).
    """
    arguments = parse(argv)
    # torch takes seconds to import; a typo is answered before that.
    from transformers.utils.logging import disable_progress_bar

    from dynamo_megatron.observe.logging import setup_logging
    from dynamo_megatron.reward.pool import RewardError
    from dynamo_megatron.rollout.errors import RolloutError

    setup_logging(rank=0)
    disable_progress_bar()  # transformers' own, of loading weights
    try:
        with _terminable():
            return _run(arguments)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"dynamo-megatron eval: {error}\n")
        return USAGE_ERROR
    except (RolloutError, RewardError) as error:
        sys.stderr.write(f"dynamo-megatron eval: {as_options(str(error))}\n")
        return FAILED
    except KeyboardInterrupt:
        sys.stderr.write("stopped; the same command goes on from here\n")
        return INTERRUPTED


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


def _run(arguments: argparse.Namespace) -> int:
    from dynamo_megatron.assets import model_folder
    from dynamo_megatron.evaluate.build import load_evaluation_problems
    from dynamo_megatron.evaluate.run import open_samples

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
    # Before anything is loaded: a folder that cannot be had is refused at once.
    with open_samples(out, settings) as file:
        samples, as_text = _sample(arguments, model_dir, problems, file, settings)
        facts = {
            "duplicates_removed": problems.duplicates,
            "too_long_left_out": problems.dropped,
            "references_compared_as_text": [prompt.id for prompt in as_text],
        }
        _report(arguments, out, settings, facts, samples)
    return _tell_failures(samples)


def _sample(
    arguments: argparse.Namespace,
    model_dir: Path,
    problems: EvaluationProblems,
    file: SampleFile,
    settings: dict[str, Any],
) -> tuple[list[Sample], tuple[Prompt, ...]]:
    """All samples, and the problems whose reference can be compared only as text."""
    from dynamo_megatron.evaluate.build import (
        EngineSpec,
        build_engine,
        build_reward,
        longest_sequence,
    )
    from dynamo_megatron.evaluate.run import Plan, evaluate

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
            kv_cache_mib=arguments.kv_cache_mib,
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
            right_from=arguments.right_from,
        )
        return evaluate(plan, engine, reward, file, settings), as_text


def _report(
    arguments: argparse.Namespace,
    out: Path,
    settings: dict[str, Any],
    facts: dict[str, Any],
    samples: Sequence[Sample],
) -> None:
    from rich.console import Console

    from dynamo_megatron.evaluate.report import (
        PAGE_NAME,
        results_table,
        write_report,
        write_summary,
    )
    from dynamo_megatron.evaluate.summary import summarise

    right_from = arguments.right_from
    summaries = summarise(samples, right_from=right_from, seed=arguments.seed)
    title = arguments.model
    write_summary(out, title=title, settings=settings, facts=facts, summaries=summaries)
    write_report(
        out,
        title=title,
        settings=settings,
        summaries=summaries,
        samples=samples,
        right_from=right_from,
    )
    Console().print(results_table(summaries))
    sys.stdout.write(f"{out / PAGE_NAME}\n")


def _tell_failures(samples: Sequence[Sample]) -> int:
    """Say why verifications failed; 1 where none succeeded, else 0."""
    failures = Counter(
        f"{sample.status}: {' '.join(sample.message.split())}"
        for sample in samples
        if sample.outcome() == "error"
    )
    if not failures:
        return 0
    count = failures.total()
    lines = [f"{count} of {len(samples)} samples could not be verified and are in no rate:"]
    for message, times in failures.most_common(_MESSAGES_SHOWN):
        # A message may quote what a model wrote: nothing for the terminal to obey.
        shown = "".join(c if c.isprintable() else "?" for c in message[:_MESSAGE_LENGTH])
        lines.append(f"  {times} x {shown}")
    others = len(failures) - _MESSAGES_SHOWN
    if others > 0:
        lines.append(f"  and {others} more kinds; samples.jsonl has them all")
    sys.stderr.write("\n".join(lines) + "\n")
    return FAILED if count == len(samples) else 0


def _settings(arguments: argparse.Namespace, model_dir: Path) -> dict[str, Any]:
    """All that decides what a sample is, but the problems and how many samples there are."""
    from dynamo_megatron.evaluate.fingerprint import (
        text_fingerprint,
        verifier_fingerprint,
        weights_fingerprint,
    )

    return {
        "model": arguments.model,
        "weights": weights_fingerprint(model_dir),
        "text_files": text_fingerprint(model_dir),
        "temperature": None if arguments.greedy else arguments.temperature,
        "max_tokens": arguments.max_tokens,
        "seed": arguments.seed,
        "template": arguments.template,
        "append": arguments.append,
        "verifier": arguments.verifier,
        "verifier_source": verifier_fingerprint(arguments.verifier),
        "right_from": arguments.right_from,
        "engine": arguments.engine,
        "dtype": arguments.dtype,
    }
