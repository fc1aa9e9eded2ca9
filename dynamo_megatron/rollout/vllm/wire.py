"""What passes between the trainer and a replica."""

from __future__ import annotations

from dataclasses import dataclass, field

from dynamo_megatron.rollout.vllm.processes import ProcessId
from dynamo_megatron.types import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """What a replica's engine is built from; the same for all replicas.

    Attributes:
        model_dir: Hugging Face folder, at this path on every node.
        dtype: name of the weights' type.
        tensor_parallel: GPUs (or CPU processes) that share one replica.
        max_model_len: longest prompt and response together, tokens.
        max_num_seqs: sequences decoded together.
        stop_token_ids: tokens that end a response; they belong to it.
        use_gpu: on a CPU the engine runs eagerly, with ``threads`` threads.
        threads: CPU threads of a replica without GPU.
        kv_cache_bytes: of a replica; None takes what ``gpu_memory_utilization`` leaves.
        gpu_memory_utilization: share of a GPU's memory that vLLM may use.
        enforce_eager: no CUDA graphs.
        load_weights: read the folder's weights; otherwise the weights are random until the first
            update, so that an update that was forgotten cannot go unnoticed.
        transfer_backend: name of the weight-transfer engine in vLLM's registry, or None.
    """

    model_dir: str
    dtype: str
    tensor_parallel: int
    max_model_len: int
    max_num_seqs: int
    stop_token_ids: tuple[int, ...]
    use_gpu: bool
    threads: int = 1
    kv_cache_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    load_weights: bool = False
    transfer_backend: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the tokens of a set of requests are drawn.

    Attributes:
        temperature: of softmax(logits / temperature); None takes the most likely token.
        max_tokens: longest response.
        top_p: kept probability mass; 1 keeps all.
        top_k: kept tokens; 0 keeps all.
        version: of the weights that must sample.
    """

    temperature: float | None
    max_tokens: int
    version: int
    top_p: float = 1.0
    top_k: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One rollout to sample.

    Attributes:
        key: unique among the requests in flight.
        token_ids: the prompt.
        seed: fixes the tokens, whatever they are batched with.
    """

    key: str
    token_ids: tuple[int, ...]
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sampled response.

    Attributes:
        key: of its request.
        token_ids: as the engine sampled them.
        logprobs: of each, nats, at the sampling temperature.
        finish_reason: why it ended.
        version: of the weights that sampled it.
        started_s: when the engine took the request up (seconds since the epoch).
        finished_s: when it was complete.
    """

    key: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    version: int
    started_s: float
    finished_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A replica's answer to a call that brought new requests.

    Attributes:
        samples: responses that were completed since the last answer.
        unfinished: requests the replica still holds.
        steps: engine steps so far; a number that stands still while requests are held means that
            the engine hangs.
    """

    samples: tuple[Sample, ...]
    unfinished: int
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFacts:
    """Where a replica runs.

    Attributes:
        process: on which node, and which there.
        parameters: number of the engine's parameters, fused ones counted once.
        kv_cache_tokens: tokens that fit into the cache.
    """

    process: ProcessId
    parameters: int
    kv_cache_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateAudit:
    """What one weight update wrote, as counted inside the engine's worker.

    Attributes:
        tensors: Hugging Face tensors received, each once.
        parameters: engine parameters written, all of them.
        problems: what contradicts "every parameter exactly once"; empty when all is well.
    """

    tensors: int
    parameters: int
    problems: tuple[str, ...] = field(default=())
