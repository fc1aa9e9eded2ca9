"""A replica around a scripted engine, with vLLM's own parameters and outputs.

Run by ``test_own_process``: vLLM changes the process that imports it.
"""

from __future__ import annotations

import os
import time
from types import SimpleNamespace

import pytest
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind

from dynamo_megatron.rollout.errors import RequestRefusedError
from dynamo_megatron.rollout.vllm import replica as replica_module
from dynamo_megatron.rollout.vllm.llm_engine import (
    LAUNCHER_VARIABLES,
    ReplicaError,
    as_sample,
    prepare_environment,
    sampling_params,
)
from dynamo_megatron.rollout.vllm.replica import Replica
from dynamo_megatron.rollout.vllm.wire import (
    ReplicaSettings,
    SampleRequest,
    Sampling,
    UpdateAudit,
)
from dynamo_megatron.types import FinishReason

STOPS = (2, 7)
PATIENCE_S = 20.0


def settings(**changes) -> ReplicaSettings:
    values = {
        "model_dir": "/model",
        "dtype": "float32",
        "tensor_parallel": 1,
        "max_model_len": 64,
        "max_num_seqs": 4,
        "stop_token_ids": STOPS,
        "use_gpu": False,
        "load_weights": True,
    }
    return ReplicaSettings(**(values | changes))


def sampling(version: int = 0, **changes) -> Sampling:
    return Sampling(**({"temperature": 0.7, "max_tokens": 9, "version": version} | changes))


def request(key: str, seed: int = 11) -> SampleRequest:
    return SampleRequest(key=key, token_ids=(3, 4, 5), seed=seed)


def output(key: str, tokens=(5, 2), reason: str | None = "stop", finished: bool = True):
    """As vLLM returns it: beside the sampled token there may be more likely ones."""
    logprobs = [
        {token: Logprob(-0.25 * (i + 1), rank=2), 99: Logprob(-0.01, rank=1)}
        for i, token in enumerate(tokens)
    ]
    completion = CompletionOutput(
        index=0,
        text="",
        token_ids=list(tokens),
        cumulative_logprob=None,
        logprobs=logprobs,
        finish_reason=reason,
    )
    return SimpleNamespace(request_id=key, outputs=[completion], finished=finished)


class Engine:
    """Finishes every request in the second step after it came."""

    vllm_config = SimpleNamespace(
        cache_config=SimpleNamespace(num_gpu_blocks=8, block_size=16),
        model_config=SimpleNamespace(get_vocab_size=lambda: 6),
    )

    def __init__(self) -> None:
        self.age: dict[str, int] = {}
        self.added: list[tuple] = []
        self.calls: list[tuple] = []
        self.aborted: list[str] = []
        self.problems: tuple[str, ...] = ()
        self.resets = True
        self.failure: Exception | None = None
        self.frozen = False
        self.delay: dict[str, int] = {}
        self.refused: set[str] = set()
        self.version: str | None = None

    def add_request(self, key, prompt, params) -> None:
        if key in self.refused:
            raise ValueError("Token id 999 is out of vocabulary")
        self.age[key] = 0
        self.added.append((key, prompt, params))

    def step(self) -> list:
        if self.failure:
            raise self.failure
        time.sleep(0.001)
        if self.frozen:
            return []
        self.age = {key: age + 1 for key, age in self.age.items()}
        done = [key for key, age in self.age.items() if age == 2 + self.delay.get(key, 0)]
        for key in done:
            del self.age[key]
        return [output(key) for key in done] + [
            output(key, tokens=(5,), reason=None, finished=False) for key in self.age
        ]

    def collective_rpc(self, method, args=()) -> list:
        self.calls.append((method, *args))
        if method == "dynamo_end_update":
            return [UpdateAudit(tensors=3, parameters=2, problems=self.problems)] * 2
        return [5]

    def abort_request(self, keys, internal) -> None:
        self.aborted += keys
        for key in keys:
            del self.age[key]

    def reset_prefix_cache(self) -> bool:
        return self.resets

    def set_weight_version(self, version: str) -> None:
        self.version = version


@pytest.fixture
def started(monkeypatch):
    """(replica, engine); the replica's thread ends with the test."""
    engine = Engine()
    monkeypatch.setattr(replica_module, "build_engine", lambda settings: engine)
    monkeypatch.setattr(replica_module, "prepare_environment", lambda settings: None)
    replica = Replica(settings())
    facts = replica.start()
    assert (facts.parameters, facts.kv_cache_tokens) == (5, 128)
    assert facts.process.pid == os.getpid() == replica.alive()
    yield replica, engine
    engine.frozen = False
    replica.close()
    replica._thread.join(PATIENCE_S)
    assert not replica._thread.is_alive()


def collect(replica: Replica, count: int, first=(), how=None):
    """All samples of some exchanges."""
    how = how or sampling()
    found, deadline, new = [], time.monotonic() + PATIENCE_S, list(first)
    while len(found) < count:
        assert time.monotonic() < deadline
        found += replica.exchange(new, how, 1.0).samples
        new = []
    return found


def test_sampling_parameters_name_everything_that_shapes_the_distribution():
    params = sampling_params(request("a"), sampling(top_p=0.9, top_k=20), STOPS)
    assert (params.temperature, params.top_p, params.top_k) == (0.7, 0.9, 20)
    assert (params.min_p, params.repetition_penalty) == (0.0, 1.0)
    assert (params.presence_penalty, params.frequency_penalty) == (0.0, 0.0)
    assert (params.seed, params.n, params.max_tokens, params.min_tokens) == (11, 1, 9, 0)
    assert params.stop_token_ids == [2, 7]
    assert params.ignore_eos
    assert params.logprobs == 0  # of the sampled token only
    assert not params.detokenize
    assert params.output_kind is RequestOutputKind.FINAL_ONLY  # no copy of a response each step


def test_greedy_sampling_has_neither_seed_nor_cuts():
    params = sampling_params(request("a"), sampling(temperature=None, top_p=0.5, top_k=3), STOPS)
    assert params.temperature == 0.0
    assert params.top_p == 1.0
    assert params.top_k in (0, -1)  # vLLM's words for all
    assert params.seed is None


def test_a_finished_output_keeps_tokens_and_the_sampled_ones_logprobs():
    sample = as_sample(output("a/3", tokens=(5, 6, 2)), 4, 100.0)
    assert sample.key == "a/3"
    assert sample.token_ids == (5, 6, 2)
    assert sample.logprobs == (-0.25, -0.5, -0.75)
    assert sample.finish_reason is FinishReason.STOP
    assert (sample.version, sample.started_s) == (4, 100.0)
    assert abs(sample.finished_s - time.time()) < PATIENCE_S


def test_the_limit_is_a_reason_to_end_and_an_abort_is_not():
    assert as_sample(output("a", reason="length"), 0, 0.0).finish_reason is FinishReason.LENGTH
    with pytest.raises(ReplicaError, match="request a ended with 'abort' after 2 tokens"):
        as_sample(output("a", reason="abort"), 0, 0.0)


def test_requests_come_back_once_with_the_version_that_sampled_them(started):
    replica, engine = started
    found = collect(replica, 9, [request(f"p/{k}", seed=k) for k in range(9)])
    assert sorted(sample.key for sample in found) == [f"p/{k}" for k in range(9)]
    assert {sample.version for sample in found} == {0}
    assert [params.seed for _, _, params in engine.added] == list(range(9))
    assert all(prompt == {"prompt_token_ids": [3, 4, 5]} for _, prompt, _ in engine.added)
    last = replica.exchange([], sampling(), 0.01)
    assert (last.samples, last.unfinished) == ((), 0)


def test_an_exchange_without_an_answer_ends_after_its_time(started):
    replica, _ = started
    begin = time.monotonic()
    assert replica.exchange([], sampling(), 0.05).samples == ()
    assert 0.05 <= time.monotonic() - begin < PATIENCE_S


def test_steps_are_told_so_that_a_hang_can_be_seen(started):
    replica, engine = started
    engine.frozen = True
    before = replica.exchange([request("a")], sampling(), 0.02)
    after = replica.exchange([], sampling(), 0.05)
    assert after.steps > before.steps
    assert after.unfinished == 1


def test_an_answer_does_not_linger_when_work_waits_and_a_place_is_empty(started, monkeypatch):
    replica, _ = started
    monkeypatch.setattr(replica_module, "LINGER_S", PATIENCE_S)
    begin = time.monotonic()
    found = replica.exchange([request("a")], sampling(), PATIENCE_S, True)
    assert [sample.key for sample in found.samples] == ["a"]
    assert time.monotonic() - begin < PATIENCE_S / 2


def test_answers_that_come_one_after_the_other_travel_together(started, monkeypatch):
    replica, engine = started
    monkeypatch.setattr(replica_module, "LINGER_S", 0.3)
    replica.exchange([], sampling(), 0.0)
    engine.delay = {"b": 4}
    found = replica.exchange([request("a"), request("b")], sampling(), PATIENCE_S, False)
    assert [sample.key for sample in found.samples] == ["a", "b"]


@pytest.mark.parametrize("version", [1, -1])
def test_another_version_than_the_loaded_one_is_not_sampled_from(started, version):
    replica, engine = started
    with pytest.raises(ReplicaError, match=f"version {version}, but this replica holds 0"):
        replica.exchange([request("a")], sampling(version), 0.1)
    assert engine.added == []


def test_an_update_changes_the_version_and_only_at_its_end(started):
    replica, engine = started
    replica.begin_update()
    with pytest.raises(ReplicaError, match="holds no complete version"):
        replica.exchange([request("a")], sampling(0), 0.1)
    replica.load_bucket(memoryview(b"bytes"))
    replica.receive_bucket({"names": []})
    assert replica.end_update(5) == UpdateAudit(tensors=3, parameters=2, problems=())
    assert engine.calls[1:] == [
        ("dynamo_begin_update",),
        ("dynamo_load_bucket", b"bytes"),
        ("dynamo_receive_bucket", {"names": []}),
        ("dynamo_end_update",),
    ]
    assert engine.version == "5"
    assert collect(replica, 1, [request("a")], sampling(5))[0].version == 5


def test_an_update_that_does_not_fit_leaves_no_version(started):
    replica, engine = started
    replica.begin_update()
    engine.problems = ("1 never came: w",)
    with pytest.raises(ReplicaError, match=r"1 never came: w\. The exporter"):
        replica.end_update(1)
    with pytest.raises(ReplicaError, match="no complete version"):
        replica.exchange([request("a")], sampling(1), 0.1)


def test_a_prefix_cache_that_stays_ends_the_update(started):
    replica, engine = started
    replica.begin_update()
    engine.resets = False
    with pytest.raises(ReplicaError, match="did not reset its prefix cache"):
        replica.end_update(1)
    with pytest.raises(ReplicaError, match="no complete version"):
        replica.exchange([request("a")], sampling(1), 0.1)


def test_no_update_begins_while_requests_are_unfinished(started):
    replica, engine = started
    engine.frozen = True
    replica.exchange([request("a"), request("b")], sampling(), 0.02)
    with pytest.raises(ReplicaError, match="while 2 requests were unfinished"):
        replica.begin_update()


def test_cancelled_requests_are_forgotten(started):
    replica, engine = started
    engine.frozen = True
    replica.exchange([request("a"), request("b")], sampling(), 0.05)
    replica.cancel()
    assert sorted(engine.aborted) == ["a", "b"]
    engine.frozen = False
    assert [sample.key for sample in collect(replica, 1, [request("c")])] == ["c"]
    assert replica.exchange([], sampling(), 0.01).unfinished == 0


def test_an_engine_that_fails_says_so_at_every_later_call(started):
    replica, engine = started
    engine.failure = ValueError("broken kernel")
    for requests in ([request("a")], []):
        with pytest.raises(ReplicaError, match=r"the engine failed: ValueError\('broken kernel'\)"):
            replica.exchange(requests, sampling(), PATIENCE_S)


def test_a_request_that_vllm_refuses_is_named_and_the_engine_goes_on(started):
    replica, engine = started
    engine.refused = {"b"}
    with pytest.raises(RequestRefusedError, match="request b with 3 prompt tokens: Token id 999"):
        replica.exchange([request("b")], sampling(), PATIENCE_S)
    assert [sample.key for sample in collect(replica, 1, [request("c")])] == ["c"]
    with pytest.raises(RequestRefusedError):
        collect(replica, 2, [request("a"), request("b")])
    replica.cancel()
    assert replica.exchange([], sampling(), 0.01).unfinished == 0


@pytest.mark.parametrize("token", [6, -1])
def test_a_token_beyond_the_embedding_never_reaches_vllm(started, token):
    replica, engine = started
    unknown = SampleRequest(key="b", token_ids=(3, token), seed=1)
    with pytest.raises(RequestRefusedError, match=f"token id {token} is not in .* vocabulary of 6"):
        replica.exchange([unknown], sampling(), PATIENCE_S)
    assert engine.added == []


def test_without_weights_of_its_own_a_replica_waits_for_an_update(monkeypatch):
    monkeypatch.setattr(replica_module, "build_engine", lambda settings: Engine())
    monkeypatch.setattr(replica_module, "prepare_environment", lambda settings: None)
    replica = Replica(settings(load_weights=False))
    replica.start()
    try:
        with pytest.raises(ReplicaError, match="no complete version"):
            replica.exchange([request("a")], sampling(0), 0.1)
    finally:
        replica.close()
        replica._thread.join(PATIENCE_S)


@pytest.fixture
def environment(monkeypatch):
    for name in (*LAUNCHER_VARIABLES, "OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND"):
        monkeypatch.setenv(name, "before")
    return os.environ


def test_a_replica_without_gpu_binds_no_threads_and_takes_its_own_number(environment):
    prepare_environment(settings(threads=3))
    assert environment["OMP_NUM_THREADS"] == "3"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environment["VLLM_NO_USAGE_STATS"] == "1"
    assert not set(LAUNCHER_VARIABLES) & environment.keys()


def test_a_replica_with_gpu_keeps_the_threads_it_was_given(environment):
    prepare_environment(settings(use_gpu=True))
    assert environment["OMP_NUM_THREADS"] == "before"
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "before"
