"""Builds the parts of an evaluation, without Megatron-Core: engine, verifier, problems."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dynamo_megatron.config import ArithmeticSource, FileSource, ReasoningGymSource, Source
from dynamo_megatron.data.files import kind_of
from dynamo_megatron.data.problems import DataError, Problem
from dynamo_megatron.data.prompts import tokenize_prompts
from dynamo_megatron.data.sources import load_problems
from dynamo_megatron.data.tokenizer import load_tokenizer, pad_token_id, stop_token_ids
from dynamo_megatron.protocols import RolloutEngine
from dynamo_megatron.reward.pool import VERIFIERS, RewardPool
from dynamo_megatron.rollout.hf_engine import HfEngine
from dynamo_megatron.rollout.vllm.build import VllmSpec, build_vllm_engine
from dynamo_megatron.types import Prompt

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """What an engine is built from.

    Attributes:
        model_dir: Hugging Face folder.
        max_tokens: longest response.
        max_model_len: longest prompt and response together.
        batch_size: sequences that a replica decodes together.
        dtype: name of the weights' type.
        replicas: copies of the model that share the work.
        tensor_parallel: GPUs or processes that each is split over.
        kv_cache_mib: of each copy that vLLM serves, for keys and values; None: what a GPU has left,
            256 without a GPU.
    """

    model_dir: Path
    max_tokens: int
    max_model_len: int
    batch_size: int
    dtype: str
    replicas: int = 1
    tensor_parallel: int = 1
    kv_cache_mib: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationProblems:
    """The problems of an evaluation as prompts.

    Attributes:
        prompts: tokenised.
        labels: the data sets' own names of problems, by prompt id.
        duplicates: records left out as repetitions.
        dropped: problems left out as too long.
    """

    prompts: tuple[Prompt, ...]
    labels: Mapping[str, str]
    duplicates: int
    dropped: int


def build_engine(name: str, spec: EngineSpec) -> RolloutEngine:
    """The engine of this name with the folder's weights.

    Raises:
        ValueError: there is no such engine, or it cannot be split as asked.
    """
    if name not in ENGINES:
        raise ValueError(f"there is no engine {name!r}; there is {', '.join(ENGINES)}.")
    return ENGINES[name](spec)


def _hf_engine(spec: EngineSpec) -> RolloutEngine:
    if (spec.replicas, spec.tensor_parallel) != (1, 1):
        raise ValueError(
            f"--replicas {spec.replicas} --tensor-parallel {spec.tensor_parallel} with --engine "
            "hf: it is one copy of the model in this process. Leave both out, or choose an engine "
            "of several processes."
        )
    tokenizer = load_tokenizer(spec.model_dir)
    stops = stop_token_ids(tokenizer, spec.model_dir)
    return HfEngine(
        spec.model_dir,
        max_tokens=spec.max_tokens,
        batch_size=spec.batch_size,
        stop_token_ids=stops,
        pad_token_id=pad_token_id(tokenizer, stops),
        dtype=DTYPES[spec.dtype],
        device="cuda" if torch.cuda.is_available() else "cpu",
        version=0,
    )


def _vllm_engine(spec: EngineSpec) -> RolloutEngine:
    positions = _positions(spec.model_dir)
    if positions is not None and spec.max_model_len > positions:
        raise ValueError(
            f"--max-tokens {spec.max_tokens}: with the longest prompt that is {spec.max_model_len} "
            f"tokens, and the model was made for {positions}; vLLM refuses more. Lower "
            f"--max-tokens to {positions - spec.max_model_len + spec.max_tokens} or less."
        )
    return build_vllm_engine(
        VllmSpec(
            model_dir=spec.model_dir.resolve(),
            dtype=spec.dtype,
            max_tokens=spec.max_tokens,
            max_model_len=spec.max_model_len,
            stop_token_ids=stop_token_ids(load_tokenizer(spec.model_dir), spec.model_dir),
            use_gpu=torch.cuda.is_available(),
            replicas=spec.replicas,
            tensor=spec.tensor_parallel,
            kv_cache_mib=spec.kv_cache_mib,
            max_num_seqs=spec.batch_size,
            load_weights=True,
            transport="object_store",
        )
    )


ENGINES: Mapping[str, Callable[[EngineSpec], RolloutEngine]] = {
    "hf": _hf_engine,
    "vllm": _vllm_engine,
}
"""Engines by name; each gives the weights of the folder as version 0."""


def build_reward(verifier: str, *, workers: int, timeout_s: float) -> RewardPool:
    """Worker processes with a built-in verifier, or the user's ``module:function``."""
    return RewardPool(VERIFIERS.get(verifier, verifier), workers=workers, timeout_s=timeout_s)


def load_evaluation_problems(
    data: Sequence[str],
    model_dir: Path,
    *,
    template: str,
    max_prompt_tokens: int,
    instruction: str,
    limit: int | None,
) -> EvaluationProblems:
    """Read the problems.

    Args:
        data: files, folders, ``arithmetic:COUNT`` or ``reasoning_gym:TASK:COUNT``.
        model_dir: for its tokenizer.
        template: ``chat`` or ``raw``.
        max_prompt_tokens: longer prompts are left out and counted.
        instruction: put under every problem, or "".
        limit: take the first so many problems of each item of ``data``, after duplicates.

    Raises:
        DataError: a file cannot be used.
    """
    problems: dict[str, Problem] = {}
    duplicates = 0
    for item in data:
        loaded = load_problems([source_of(item)])
        duplicates += loaded.duplicates
        for problem in loaded.problems[:limit]:
            text = f"{problem.text}\n\n{instruction}" if instruction else problem.text
            asked = replace(problem, text=text)
            duplicates += asked.id in problems
            problems[asked.id] = asked
    tokenized = tokenize_prompts(
        list(problems.values()),
        load_tokenizer(model_dir),
        template="raw" if template == "raw" else "chat",
        max_prompt_tokens=max_prompt_tokens,
    )
    return EvaluationProblems(
        prompts=tokenized.prompts,
        labels={problem_id: problem.label for problem_id, problem in problems.items()},
        duplicates=duplicates,
        dropped=tokenized.dropped_overlong,
    )


def source_of(item: str) -> Source:
    """The source that an item of ``--data`` names.

    Raises:
        DataError: it names none.
    """
    kind, _, rest = item.partition(":")
    if kind == "arithmetic":
        return ArithmeticSource(kind=kind, num_problems=_count(rest, item), split="heldout")
    if kind == "reasoning_gym":
        task, _, number = rest.partition(":")
        return ReasoningGymSource(kind=kind, task=task, num_problems=_count(number, item))
    path = Path(item).expanduser()
    if not path.exists():
        raise DataError(f"{path} does not exist (seen from {Path.cwd()}). Correct --data.")
    return FileSource(kind=kind_of(path), path=str(path))


def _count(text: str, item: str) -> int:
    if text.isdecimal() and int(text):
        return int(text)
    raise DataError(
        f"--data {item}: the number of problems is missing. Write arithmetic:200 or "
        "reasoning_gym:chain_sum:200."
    )


def longest_sequence(prompts: Sequence[Prompt], max_tokens: int, model_dir: Path) -> int:
    """Tokens of the longest prompt with the longest response; warns where the model ends earlier.

    Args:
        prompts: all of them.
        max_tokens: longest response.
        model_dir: of the model.
    """
    longest = max((len(prompt.token_ids) for prompt in prompts), default=0) + max_tokens
    positions = _positions(model_dir)
    if positions is not None and longest > positions:
        logger.warning(
            "the longest prompt with --max-tokens %d has %d tokens, and the model was made for %d: "
            "what it writes beyond them is worth nothing. Lower --max-tokens.",
            max_tokens,
            longest,
            positions,
        )
    return longest


def _positions(model_dir: Path) -> int | None:
    """Tokens that the model was made for, as it states them."""
    config = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    positions = config.get("max_position_embeddings")
    return positions if isinstance(positions, int) else None
