"""``vllm.LLM.generate`` in a process of its own, for ``rollout.py`` to compare with."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dynamo_megatron.rollout.vllm.llm_engine import (
    engine_arguments,
    prepare_environment,
    sampling_params,
)
from dynamo_megatron.rollout.vllm.wire import ReplicaSettings

PATIENCE_S = 600.0


def bare_vllm(connection: Any, settings: ReplicaSettings, log: str) -> None:
    """A process that answers (requests, sampling) with what a ``Turn`` is made of."""
    words = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(words, 1)
    os.dup2(words, 2)
    prepare_environment(settings)
    from vllm import LLM

    llm = LLM.from_engine_args(engine_arguments(settings))
    connection.send("ready")
    while True:
        requests, sampling = connection.recv()
        prompts: Any = [{"prompt_token_ids": list(request.token_ids)} for request in requests]
        parameters = [sampling_params(r, sampling, settings.stop_token_ids) for r in requests]
        cpu, begin = time.process_time(), time.perf_counter()
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
        connection.send((seconds, cpu, [tuple(o.outputs[0].token_ids) for o in outputs]))


@contextmanager
def bare_process(settings: ReplicaSettings) -> Iterator[Any]:
    """The connection to bare vLLM."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        process = context.Process(target=bare_vllm, args=(there, settings, str(log)), daemon=True)
        process.start()
        there.close()
        try:
            answer(here)
            yield here
        except EOFError:
            raise RuntimeError(f"bare vLLM died:\n{log.read_text()[-4000:]}") from None
        finally:
            process.kill()
            process.join()


def answer(connection: Any) -> Any:
    """What bare vLLM says."""
    if not connection.poll(PATIENCE_S):
        raise RuntimeError(f"bare vLLM did not answer within {PATIENCE_S:g} s.")
    return connection.recv()
