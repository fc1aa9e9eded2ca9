"""A replica: vLLM's engine in a process of its own, driven by one call at a time.

The engine steps in a thread, so that it never waits for the trainer; a call brings new requests and
takes the responses that are complete. Runs in a Ray actor; nothing here knows of Ray.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from dynamo_megatron.rollout.errors import RequestRefusedError
from dynamo_megatron.rollout.vllm.llm_engine import (
    ReplicaError,
    as_sample,
    build_engine,
    prepare_environment,
    sampling_params,
)
from dynamo_megatron.rollout.vllm.processes import ProcessId, end_process, own_process
from dynamo_megatron.rollout.vllm.wire import (
    Exchange,
    ReplicaFacts,
    ReplicaSettings,
    Sample,
    SampleRequest,
    Sampling,
    UpdateAudit,
)

logger = logging.getLogger(__name__)

LINGER_S = 0.03
"""Responses that complete within this time travel together: a call costs more than a response."""


class Replica:
    """One vLLM engine. Calls may come from several threads.

    Args:
        settings: of the engine.
    """

    def __init__(self, settings: ReplicaSettings) -> None:
        self._settings = settings
        self._engine: Any = None
        self._vocabulary = 0
        self._version: int | None = None
        self._inbox: deque[tuple[SampleRequest, Sampling]] = deque()
        self._outbox: list[Sample] = []
        self._held: dict[str, tuple[int, float]] = {}  # version and start of each request
        self._failure: BaseException | None = None
        self._refusal: str | None = None
        self._steps = 0
        self._closing = False
        # The engine is touched under this lock only; the other two guard what calls exchange.
        self._engine_lock = threading.Lock()
        self._arrived = threading.Condition()
        self._completed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="vllm-engine", daemon=True)

    def start(self, predecessor: ProcessId | None = None) -> ReplicaFacts:
        """Build the engine, unless it is there; takes from seconds to minutes.

        Args:
            predecessor: the process in whose place this one is. It must have ended first, or there
                is no memory for this one: Ray counts a process as gone when its connection is.

        Raises:
            RuntimeError: the predecessor does not end.
        """
        if self._engine is None:
            if predecessor is not None:
                end_process(predecessor)
            prepare_environment(self._settings)
            self._engine = _buildable(self._settings)
            self._vocabulary = self._engine.vllm_config.model_config.get_vocab_size()
            if self._settings.load_weights:
                self._version = 0
            self._thread.start()
        return ReplicaFacts(
            process=own_process(),
            parameters=self._rpc("dynamo_parameters")[0],
            kv_cache_tokens=_kv_cache_tokens(self._engine),
        )

    def alive(self) -> int:
        """The number of this process; asks nothing of the engine."""
        return os.getpid()

    def exchange(
        self,
        requests: Sequence[SampleRequest],
        sampling: Sampling,
        wait_s: float,
        more_waits: bool = False,
    ) -> Exchange:
        """Bring new requests, take the responses that are complete.

        Args:
            requests: to be sampled; may be none.
            sampling: how.
            wait_s: answer after this time even when nothing is complete.
            more_waits: there are requests that no replica holds: answer before a place is empty.

        Raises:
            ReplicaError: the engine failed, or holds other weights than ``sampling.version``.
            RequestRefusedError: vLLM does not take one of the requests.
        """
        if requests:
            self._require_version(sampling.version)
            with self._arrived:
                self._inbox.extend((request, sampling) for request in requests)
                self._arrived.notify()
        with self._completed:
            self._completed.wait_for(
                lambda: self._outbox or self._failure or self._refusal, timeout=wait_s
            )
            if self._outbox:
                self._completed.wait_for(
                    lambda: self._failure or self._idles_soon(more_waits), timeout=LINGER_S
                )
            if self._failure is not None:
                raise ReplicaError(f"the engine failed: {self._failure!r}") from self._failure
            if self._refusal is not None:
                refusal, self._refusal = self._refusal, None
                raise RequestRefusedError(refusal)
            samples, self._outbox = tuple(self._outbox), []
        return Exchange(
            samples=samples,
            unfinished=len(self._held) + len(self._inbox),
            steps=self._steps,
        )

    def cancel(self) -> None:
        """Forget every request and response."""
        with self._engine_lock:
            self._inbox.clear()
            self._engine.abort_request(list(self._held), internal=False)
            self._held.clear()
            with self._completed:
                self._outbox.clear()
                self._refusal = None

    def begin_update(self) -> None:
        """Start a weight update. No version can be sampled from until it has ended."""
        with self._engine_lock:
            self._require_idle()
            self._version = None
            self._rpc("dynamo_begin_update")

    def load_bucket(self, payload: bytes) -> None:
        """Load tensors that came as safetensors bytes."""
        with self._engine_lock:
            self._rpc("dynamo_load_bucket", bytes(payload))

    def connect(self, init_info: dict[str, Any]) -> None:
        """Join the trainer's group of vLLM's weight-transfer engine; ends an earlier one."""
        with self._engine_lock:
            self._rpc("shutdown_weight_transfer_engine")
            self._rpc("init_weight_transfer_engine", init_info)

    def receive_bucket(self, update_info: dict[str, Any]) -> None:
        """Receive tensors through vLLM's weight-transfer engine."""
        with self._engine_lock:
            self._rpc("dynamo_receive_bucket", update_info)

    def end_update(self, version: int) -> UpdateAudit:
        """End an update: check it, forget what was computed with older weights.

        Raises:
            ReplicaError: a parameter was not written exactly once, on any worker; or the prefix
                cache could not be reset. The replica then samples from no version.
        """
        with self._engine_lock:
            audits: list[UpdateAudit] = self._rpc("dynamo_end_update")
            problems = [problem for audit in audits for problem in audit.problems]
            if problems:
                raise ReplicaError(
                    "the weight update does not fit the engine's model: "
                    f"{'; '.join(dict.fromkeys(problems))}. The exporter and the engine must come "
                    "from the same config.json."
                )
            if not self._engine.reset_prefix_cache():
                raise ReplicaError(
                    "vLLM did not reset its prefix cache after the weight update: attention would "
                    "read keys and values of older weights."
                )
            self._engine.set_weight_version(str(version))
            self._version = version
            return audits[0]

    def close(self) -> None:
        """End the engine's thread."""
        self._closing = True
        with self._arrived:
            self._arrived.notify()

    def _idles_soon(self, more_waits: bool) -> bool:
        """Whether an answer now keeps a place from being empty, or is the last one."""
        held = len(self._held) + len(self._inbox)
        return held <= (self._settings.max_num_seqs if more_waits else 0)

    def _require_version(self, version: int) -> None:
        if self._version != version:
            raise ReplicaError(
                f"asked to sample from weights of version {version}, but this replica holds "
                f"{'no complete version' if self._version is None else self._version}: the "
                "samples would come from another policy."
            )

    def _require_idle(self) -> None:
        if self._held or self._inbox:
            raise ReplicaError(
                f"a weight update began while {len(self._held) + len(self._inbox)} requests "
                "were unfinished: they would be sampled from two policies."
            )

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        return self._engine.collective_rpc(method, args=args)

    def _run(self) -> None:
        try:
            while not self._closing:
                self._wait_for_work()
                with self._engine_lock:
                    self._admit()
                    self._step()
        except BaseException as error:
            logger.exception("the engine failed")
            with self._completed:
                self._failure = error
                self._completed.notify_all()

    def _wait_for_work(self) -> None:
        if self._held or self._inbox:
            return
        with self._arrived:
            self._arrived.wait_for(lambda: self._inbox or self._closing)

    def _admit(self) -> None:
        while self._inbox:
            request, sampling = self._inbox.popleft()
            try:
                self._require_known_tokens(request)
                self._engine.add_request(
                    request.key,
                    {"prompt_token_ids": list(request.token_ids)},
                    sampling_params(request, sampling, self._settings.stop_token_ids),
                )
            except ValueError as error:  # also vLLM's word for what it cannot serve
                self._refuse(request, error)
            else:
                self._held[request.key] = sampling.version, time.time()

    def _require_known_tokens(self, request: SampleRequest) -> None:
        """Without a tokenizer vLLM does not look: it reads beyond its embedding, or takes zeros."""
        # This thread steps the engine: no loop over tokens in Python.
        low, high = min(request.token_ids, default=0), max(request.token_ids, default=0)
        if low < 0 or high >= self._vocabulary:
            raise ValueError(
                f"token id {low if low < 0 else high} is not in the model's vocabulary of "
                f"{self._vocabulary}."
            )

    def _refuse(self, request: SampleRequest, error: ValueError) -> None:
        logger.error("vLLM does not take a request", exc_info=error)
        with self._completed:
            self._refusal = self._refusal or (
                f"vLLM does not take request {request.key} with {len(request.token_ids)} prompt "
                f"tokens: {str(error).strip()}"
            )
            self._completed.notify()

    def _step(self) -> None:
        if not self._held:
            return
        outputs = [output for output in self._engine.step() if output.finished]
        self._steps += 1
        if not outputs:
            return
        samples = [as_sample(output, *self._held.pop(output.request_id)) for output in outputs]
        with self._completed:
            self._outbox.extend(samples)
            self._completed.notify()


def _buildable(settings: ReplicaSettings) -> Any:
    """The engine, or an error that can travel: some of vLLM's cannot be pickled."""
    try:
        return build_engine(settings)
    except MemoryError:
        raise
    except Exception as error:
        logger.exception("the engine could not be built")
        raise ReplicaError(f"{type(error).__name__}: {error}") from None


def _kv_cache_tokens(engine: Any) -> int:
    cache = engine.vllm_config.cache_config
    return (cache.num_gpu_blocks or 0) * cache.block_size
