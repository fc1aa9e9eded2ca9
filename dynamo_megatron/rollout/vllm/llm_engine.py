"""vLLM's engine: what it is built from, what goes in and what comes out.

Of vLLM, nothing is imported before the environment that it reads has been prepared.
"""

from __future__ import annotations

import os
import time
from typing import Any

from dynamo_megatron.rollout.vllm.shared_memory import forget_shared_names
from dynamo_megatron.rollout.vllm.wire import ReplicaSettings, Sample, SampleRequest, Sampling
from dynamo_megatron.types import FinishReason

BATCHED_TOKENS = 2048
"""Prompt tokens that a replica without GPU reads at a time."""

LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "MASTER_ADDR",
    "MASTER_PORT",
    "VLLM_CPU_KVCACHE_SPACE",
)
"""Of torchrun, which would be read as this engine's own; and what would override its settings."""

WARM_UP = 3
"""Requests that a new engine answers first."""


class ReplicaError(RuntimeError):
    """The engine failed, or was asked for what it must not do."""


def sampling_params(
    request: SampleRequest, sampling: Sampling, stop_token_ids: tuple[int, ...]
) -> Any:
    """Parameters for vLLM, every one that shapes the distribution named.

    A generation_config.json beside a checkpoint would otherwise set some of them.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    greedy = sampling.temperature is None
    return SamplingParams(
        n=1,
        temperature=sampling.temperature or 0.0,
        top_p=1.0 if greedy else sampling.top_p,
        top_k=0 if greedy else sampling.top_k,
        min_p=0.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        seed=None if greedy else request.seed,
        max_tokens=sampling.max_tokens,
        min_tokens=0,
        stop_token_ids=list(stop_token_ids),
        ignore_eos=True,  # the stop tokens are named above
        logprobs=0,
        detokenize=False,
        skip_special_tokens=False,
        # Otherwise each step copies every response so far.
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def as_sample(output: Any, version: int, started_s: float) -> Sample:
    """A finished ``RequestOutput`` of vLLM.

    Raises:
        ReplicaError: it ended for another reason than a stop token or the limit.
    """
    (completion,) = output.outputs
    if completion.finish_reason not in ("stop", "length"):
        raise ReplicaError(
            f"request {output.request_id} ended with {completion.finish_reason!r} after "
            f"{len(completion.token_ids)} tokens: only a stop token or the limit may end one."
        )
    token_ids = tuple(completion.token_ids)
    logprobs = zip(token_ids, completion.logprobs, strict=True)
    return Sample(
        key=output.request_id,
        token_ids=token_ids,
        logprobs=tuple(at[token].logprob for token, at in logprobs),
        finish_reason=FinishReason(completion.finish_reason),
        version=version,
        started_s=started_s,
        finished_s=time.time(),
    )


def prepare_environment(settings: ReplicaSettings) -> None:
    """What vLLM reads from the environment, set before it is imported."""
    for name in LAUNCHER_VARIABLES:
        os.environ.pop(name, None)
    os.environ.update(
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        DO_NOT_TRACK="1",
        # The engine lives in this process: no copy of every request through another socket.
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_LOGGING_LEVEL=os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
    )
    if not settings.use_gpu:
        # Unset, vLLM's threads spin and take 5 to 20 times as long.
        os.environ["OMP_NUM_THREADS"] = str(settings.threads)
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # Eager it is anyway; the few functions that vLLM compiles all the same cost 10 s of a
        # start, and 150 MB of compiled headers in the temporary folder.
        os.environ["TORCHDYNAMO_DISABLE"] = "1"


def build_engine(settings: ReplicaSettings) -> Any:
    """The engine, in this process, warm."""
    from vllm.v1.engine.llm_engine import LLMEngine

    engine = LLMEngine.from_engine_args(engine_arguments(settings))
    forget_shared_names()
    warm_up(engine, settings.stop_token_ids)
    return engine


def engine_arguments(settings: ReplicaSettings) -> Any:
    """The ``EngineArgs`` of vLLM that the settings stand for."""
    from vllm import EngineArgs

    from dynamo_megatron.rollout.vllm.worker import EXTENSION

    optional: dict[str, Any] = {}
    if settings.kv_cache_bytes is not None:
        optional["kv_cache_memory_bytes"] = settings.kv_cache_bytes
    if not settings.use_gpu:
        # vLLM 0.32 rewinds a request's random numbers after part of a prompt, which a CPU's
        # generator cannot: "CPU Generator does not use offset". Whole prompts need no rewinding.
        optional["enable_chunked_prefill"] = False
        optional["max_num_batched_tokens"] = max(BATCHED_TOKENS, settings.max_model_len)
    if settings.transfer_backend is not None:
        optional["weight_transfer_config"] = {"backend": settings.transfer_backend}
    return EngineArgs(
        model=settings.model_dir,
        dtype=settings.dtype,  # pyright: ignore[reportArgumentType]
        tensor_parallel_size=settings.tensor_parallel,
        distributed_executor_backend="mp" if settings.tensor_parallel > 1 else None,
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        enforce_eager=settings.enforce_eager or not settings.use_gpu,
        load_format="auto" if settings.load_weights else "dummy",
        skip_tokenizer_init=True,  # token ids in, token ids out
        generation_config="vllm",
        logprobs_mode="processed_logprobs",  # of softmax(logits / temperature)
        enable_prefix_caching=True,
        disable_log_stats=True,
        worker_extension_cls=EXTENSION,
        seed=0,
        **optional,
    )


def warm_up(engine: Any, stop_token_ids: tuple[int, ...]) -> None:
    """Take the first steps, with batches of several sizes.

    On a GPU they compile, which can take longer than an engine may take before it counts as hung.
    """
    for place in range(WARM_UP):
        request = SampleRequest(key=f"warm-up/{place}", token_ids=(0, 0), seed=place)
        sampling = Sampling(temperature=1.0, max_tokens=2 + place, version=0)
        params = sampling_params(request, sampling, stop_token_ids)
        engine.add_request(request.key, {"prompt_token_ids": list(request.token_ids)}, params)
    while engine.has_unfinished_requests():
        engine.step()
    engine.reset_prefix_cache()
