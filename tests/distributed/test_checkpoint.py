"""Stop and resume on gloo ranks: at the same layout bit for bit, at another one the same step."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing

from tests.policies import VOCAB, Layout, hf_weights, write_qwen3
from tests.ranks import run_on_ranks
from tests.unit.checkpoint.helpers import assert_same, checkpointer, everything, policy, train

# megatron-core's own: deprecated names of collectives, gradients of main parameters.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.distributed.:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning"),
]

CASES = {
    "tp1": (Layout(), False, False),
    "tp1-distributed": (Layout(), True, False),
    "tp2+sp": (Layout(tensor=2, sequence=True), False, False),
    "pp2-tied": (Layout(pipeline=2), False, True),
    "pp2-distributed": (Layout(pipeline=2), True, False),
    "dp2": (Layout(data=2), False, False),
    "dp2-distributed-tied": (Layout(data=2), True, True),
}
STATE = {"step": 2, "cursor": {"epoch": 0, "position": 3}, "mean": 0.1 + 0.2, "tiny": 5e-324}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Model folders by whether the output layer is the embedding."""
    return {
        tied: write_qwen3(tmp_path_factory.mktemp("qwen3"), tied=tied) for tied in (False, True)
    }


@pytest.mark.parametrize("name", CASES)
def test_two_steps_then_a_resume_and_two_more_are_four_steps(name, models, tmp_path):
    layout, distributed, tied = CASES[name]
    model_dir = models[tied]

    def uninterrupted():
        with policy(model_dir, layout, distributed=distributed) as run:
            first = train(run, range(2))
            checkpointer(run, tmp_path).save(2, STATE)
            return first, train(run, range(2, 4)), everything(run)

    def resumed():
        # Another seed: what a resume does not bring back would show.
        with policy(model_dir, layout, distributed=distributed, seed=77) as run:
            saved = checkpointer(run, tmp_path)
            state = saved.load(saved.latest())
            return state, train(run, range(2, 4)), everything(run)

    want = run_on_ranks(uninterrupted, layout.world_size, timeout=180)
    got = run_on_ranks(resumed, layout.world_size, timeout=180)
    for (first, updates, end), (state, resumed_updates, resumed_end) in zip(want, got, strict=True):
        assert state == STATE
        assert resumed_updates == updates
        rates = [update.learning_rate for update in first + updates]
        assert len(set(rates)) == 4, "the schedule moves, so a schedule that stands still shows"
        assert_same(resumed_end, end)


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
def test_resuming_from_a_resumed_run_and_loading_twice_change_nothing(
    distributed, models, tmp_path
):
    model_dir = models[False]

    def work():
        with policy(model_dir, distributed=distributed) as run:
            train(run, range(3))
            saved = checkpointer(run, tmp_path / "checkpoints")
            saved.save(3, {})
            want = everything(run)
        seen = []
        for _ in range(2):
            with policy(model_dir, distributed=distributed, seed=5) as run:
                saved = checkpointer(run, tmp_path / "checkpoints")
                saved.load(saved.latest())
                seen.append(everything(run))
                train(run, range(3, 5))
                saved.load(saved.latest())
                seen.append(everything(run))
                saved.save(3, {})  # over the checkpoint that was loaded
        return want, seen

    ((want, seen),) = run_on_ranks(work, 1, timeout=180)
    for got in seen:
        assert_same(got, want)


@pytest.mark.parametrize("distributed", [False, True], ids=["plain", "distributed"])
def test_bfloat16_resumes_with_its_float32_master_weights(distributed, models, tmp_path):
    model_dir = models[False]
    options = {"dtype": torch.bfloat16, "distributed": distributed}

    def work():
        with policy(model_dir, **options) as run:
            train(run, range(2))
            checkpointer(run, tmp_path / "c").save(2, {})
            updates = train(run, range(2, 3))
            want = everything(run)
        with policy(model_dir, **options, seed=9) as run:
            saved = checkpointer(run, tmp_path / "c")
            saved.load(saved.latest())
            return updates == train(run, range(2, 3)), want, everything(run)

    ((same_updates, want, got),) = run_on_ranks(work, 1, timeout=180)
    assert same_updates
    assert_same(got, want)


@pytest.mark.parametrize(
    ("distributed", "tied"), [(False, False), (True, True)], ids=["plain", "distributed-tied"]
)
def test_a_checkpoint_resumes_at_any_layout(distributed, tied, models, tmp_path):
    """TP2 -> PP2 -> DP2 -> TP2 x PP2, saving at each; every one goes on as TP2 would have."""
    model_dir = models[tied]
    stations = [
        Layout(tensor=2),
        Layout(pipeline=2),
        Layout(data=2),
        Layout(tensor=2, pipeline=2),
    ]

    def station(number: int):
        def work():
            with policy(model_dir, stations[number], distributed=distributed) as run:
                saved = checkpointer(run, tmp_path / str(number))
                if number == 0:
                    train(run, range(2))
                else:
                    checkpointer(run, tmp_path).load(tmp_path / str(number - 1) / "step_00000002")
                saved.save(2, {})
                padding = _vocabulary_padding(run)
                weights = hf_weights(run)
                return weights, padding, train(run, range(2, 4))

        return run_on_ranks(work, stations[number].world_size, timeout=180)

    want_weights, _, want_updates = station(0)[0]
    tensors = _all_tensors(tmp_path / "0" / "step_00000002")
    assert any("exp_avg_sq" in name for name in tensors)
    for number in range(1, len(stations)):
        for weights, padding, updates in station(number):
            assert all(torch.equal(weights[name], want_weights[name]) for name in want_weights)
            assert padding == 0.0
            for got, want in zip(updates, want_updates, strict=True):
                assert got.loss == pytest.approx(want.loss, rel=1e-6)
                assert got.grad_norm == pytest.approx(want.grad_norm, rel=1e-6)
                assert got.learning_rate == want.learning_rate
        _assert_equal_tensors(_all_tensors(tmp_path / str(number) / "step_00000002"), tensors)


def _vocabulary_padding(run) -> float:
    """Largest magnitude in the rows that pad the vocabulary on this rank."""
    rank = run.topology.tensor_rank
    worst = 0.0
    for name, parameter in run.module.named_parameters():
        if "word_embeddings" in name or "output_layer" in name:
            rows = torch.arange(len(parameter)) + rank * len(parameter)
            worst = max(worst, float(parameter[rows >= VOCAB].detach().abs().sum()))
    return worst


def _all_tensors(folder):
    """Whole tensors, read by Megatron-Core's own default path."""

    def work():
        warnings.simplefilter("ignore", FutureWarning)
        loaded = dist_checkpointing.load_plain_tensors(str(folder))
        return {name: value for name, value in loaded.items() if isinstance(value, torch.Tensor)}

    return run_on_ranks(work, 1, timeout=180)[0]


def _assert_equal_tensors(got, want) -> None:
    assert got.keys() == want.keys()
    for name in want:
        is_vocabulary = "word_embeddings" in name or "output_layer" in name
        rows = VOCAB if is_vocabulary else len(want[name])
        assert torch.equal(got[name][:rows], want[name][:rows]), name


def test_random_states_continue_at_the_same_layout_and_are_reseeded_at_another(models, tmp_path):
    model_dir = models[False]

    def save():
        with policy(model_dir, Layout(data=2)) as run:
            torch.rand(dist.get_rank() + 1)
            checkpointer(run, tmp_path / "c").save(1, {})
            return torch.rand(3)

    def fresh():
        with policy(model_dir, Layout()):
            return torch.rand(3)

    def load(layout: Layout):
        def work():
            messages = []
            logger = logging.getLogger("dynamo_megatron.checkpoint.megatron")
            logger.addHandler(_Collect(messages))
            with policy(model_dir, layout) as run:
                saved = checkpointer(run, tmp_path / "c")
                saved.load(saved.latest())
                return torch.rand(3), messages

        return run_on_ranks(work, layout.world_size, timeout=180)

    want = run_on_ranks(save, 2)
    assert not torch.equal(want[0], want[1])
    same = load(Layout(data=2))
    assert [torch.equal(w, g) for w, (g, _) in zip(want, same, strict=True)] == [True, True]
    assert [messages for _, messages in same] == [[], []]
    ((other, (message,)),) = load(Layout())
    ((again, _),) = load(Layout())
    (start,) = run_on_ranks(fresh, 1)
    assert torch.equal(other, again)
    assert not any(torch.equal(other, w) for w in [start, *want]), "no stream is drawn from twice"
    assert "'data': 2" in message and "'data': 1" in message and "seeded" in message


class _Collect(logging.Handler):
    def __init__(self, messages: list[str]) -> None:
        super().__init__()
        self.messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())
