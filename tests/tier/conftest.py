"""Tiers that are closed whatever happens, and what transformers says about what they sampled."""

from __future__ import annotations

import gc
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from dynamo_megatron.assets import TINY_POLICY
from dynamo_megatron.rollout.vllm.build import VllmSpec, build_vllm_engine
from dynamo_megatron.rollout.vllm.engine import VllmEngine
from dynamo_megatron.rollout.vllm.replica import Replica
from dynamo_megatron.rollout.vllm.wire import ReplicaSettings, Sample, SampleRequest, Sampling
from dynamo_megatron.types import GroupSizes, Prompt, Rollout
from tests.policies import write_model

# Ray gives its workers the lowest priority but four; on a busy machine they would hardly run.
os.environ.setdefault("RAY_worker_niceness", "0")

STOP = 2
MAX_LEN = 256
"""Prompt and response together, of random models."""
ROUNDING = 1e-5
"""Nats. Batch shapes and kernels move a float32 logprob by less, but for a token in thousands."""
BLOCK = 128
"""Tokens of a block of vLLM's KV cache on a CPU: what a prefix cache keeps or forgets."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@contextmanager
def tier(folder: Path, **spec) -> Iterator[VllmEngine]:
    """Ray and replicas, closed at the end and after any failure. One at a time in a process."""
    settings = {
        "dtype": "float32",
        "max_tokens": 24,
        "max_model_len": 96,
        "stop_token_ids": (STOP,),
        "use_gpu": False,
        "max_num_seqs": 32,
        "kv_cache_mib": 32,
        "bucket_mib": 1,
    }
    with _unreaped_processes():
        engine = build_vllm_engine(VllmSpec(model_dir=folder, **(settings | spec)))
    try:
        yield engine
    finally:
        with _unreaped_processes():
            engine.close()


@contextmanager
def _unreaped_processes() -> Iterator[None]:
    """Ray forgets its services before they are dead, of which Python complains."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            yield
        finally:
            gc.collect()


def sizes_of(prompts: Sequence[Prompt], counts: Sequence[int]) -> GroupSizes:
    return GroupSizes(prompt_ids=tuple(p.id for p in prompts), sizes=tuple(counts))


def prompt_of(name: str, token_ids: Sequence[int]) -> Prompt:
    return Prompt(id=name, text=name, token_ids=tuple(token_ids), answer="", source="test")


def write_policy(folder: Path, family: str, **options) -> Path:
    """A random model that vLLM's CPU attention takes (heads of 32), with a tokenizer."""
    shape = {
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
        "intermediate_size": 96,
        "max_position_embeddings": 512,
    }
    if family == "qwen3":
        shape["head_dim"] = 32
    write_model(folder, family, **(shape | options))
    for name in TOKENIZER_FILES:
        shutil.copy(TINY_POLICY / name, folder)
    return folder


def copy_with_defaults(folder: Path, **defaults) -> Path:
    """The shipped policy with sampling defaults beside it."""
    shutil.copytree(TINY_POLICY, folder)
    (folder / "generation_config.json").write_text(json.dumps(defaults), encoding="utf-8")
    return folder


def reference_model(folder: Path, dtype: torch.dtype = torch.float64):
    """transformers' own model of a folder, with its own attention."""
    with torch.random.fork_rng(devices=[]):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


@torch.no_grad()
def teacher_forced(model, pairs: Sequence[tuple[Prompt, Rollout]]) -> list[Tensor]:
    """[T, V] logits from which each token of each response was drawn.

    Right padding: under causal attention no token sees it.
    """
    logits: list[Tensor] = []
    for start in range(0, len(pairs), 64):
        part = pairs[start : start + 64]
        rows = [torch.tensor((*p.token_ids, *r.token_ids[:-1])) for p, r in part]
        scores = model(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)).logits
        for place, (prompt, rollout) in enumerate(part):
            first = len(prompt.token_ids) - 1
            logits.append(scores[place, first : first + len(rollout.token_ids)])
    return logits


def logprobs_of(
    logits: Sequence[Tensor], rollouts: Sequence[Rollout], temperature: float = 1.0
) -> Tensor:
    """[T of all] float64: logprobs of the tokens by transformers, nats."""
    rows = [
        (scores_TV.double() / temperature)
        .log_softmax(-1)
        .gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
        for scores_TV, rollout in zip(logits, rollouts, strict=True)
    ]
    return torch.cat(rows)


def gaps_of(
    logits: Sequence[Tensor], rollouts: Sequence[Rollout], temperature: float = 1.0
) -> Tensor:
    """[T of all] |logprob by transformers - logprob by the engine|, nats."""
    ours = torch.tensor([logp for rollout in rollouts for logp in rollout.logprobs])
    return (logprobs_of(logits, rollouts, temperature) - ours.double()).abs()


def lead_over(scores_TV: Tensor, tokens_T: Tensor) -> Tensor:
    """[T] by how much the best other token is ahead of the chosen one; negative where none is."""
    chosen_T1 = scores_TV.gather(1, tokens_T[:, None])
    others_TV = scores_TV.scatter(1, tokens_T[:, None], float("-inf"))
    return others_TV.amax(1) - chosen_T1[:, 0]


def gumbel_noise(seed: int, num_tokens: int, vocab: int) -> Tensor:
    """[T, V] float64: what vLLM 0.32 adds to a seeded request's logits on a CPU; argmax draws.

    Each token takes one 31-bit number from the request's generator. It keys SplitMix64 (Steele et
    al. 2014), whose numbered outputs become uniforms of 53 bits, and those Gumbel noise.
    """
    generator = torch.Generator().manual_seed(seed)
    keys = [int(torch.randint(0, 2**31, (1,), generator=generator)) for _ in range(num_tokens)]
    with np.errstate(over="ignore"):
        streams_T1 = _mixed(np.array(keys, dtype=np.uint64))[:, None]
        weyl_V = np.arange(1, vocab + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        bits_TV = _mixed(streams_T1 + weyl_V) >> np.uint64(11)
    uniform_TV = (bits_TV.astype(np.float64) + 0.5) * 2.0**-53
    return torch.from_numpy(-np.log(-np.log(uniform_TV)))


def _mixed(words: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


Round = tuple[tuple[SampleRequest, ...], Sampling]
"""Requests and how they are sampled; keys differ within a question."""


def fresh_answers(questions: Sequence[tuple[Path, Sequence[Round]]]) -> list[dict[str, Sample]]:
    """What an engine that vLLM itself loads from each folder samples; in a process of its own.

    A second engine in one process costs a second, where a process costs ten.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_answer_all, list(questions)).result()


def _answer_all(questions: Sequence[tuple[Path, Sequence[Round]]]) -> list[dict[str, Sample]]:
    # All engines live to the end: one that is collected takes vLLM's process groups with it.
    replicas = [Replica(_fresh_settings(folder)) for folder, _ in questions]
    return [
        _answer(replica, rounds) for replica, (_, rounds) in zip(replicas, questions, strict=True)
    ]


def _fresh_settings(folder: Path) -> ReplicaSettings:
    return ReplicaSettings(
        model_dir=str(folder),
        dtype="float32",
        tensor_parallel=1,
        max_model_len=MAX_LEN,
        max_num_seqs=32,
        stop_token_ids=(STOP,),
        use_gpu=False,
        kv_cache_bytes=16 << 20,
        load_weights=True,
    )


def _answer(replica: Replica, rounds: Sequence[Round]) -> dict[str, Sample]:
    replica.start()
    samples: dict[str, Sample] = {}
    for requests, sampling in rounds:
        new, wanted = requests, len(samples) + len(requests)
        while len(samples) < wanted:
            answer = replica.exchange(new, sampling, 5.0)
            samples |= {sample.key: sample for sample in answer.samples}
            new = ()
    replica.close()
    return samples
