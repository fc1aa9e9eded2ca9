"""Loss, gradients, factors and weights do not depend on how the policy is laid out."""

from __future__ import annotations

import pytest
import torch

from tests.policies import (
    Layout,
    hf_gradients,
    hf_weights,
    optimizer_settings,
    plan_for,
    policy_on,
    prepared,
    random_batch,
    relative_distance,
    write_qwen3,
)
from tests.ranks import run_on_ranks

LAYOUTS = {
    "tp1": Layout(),
    "tp2": Layout(tensor=2),
    "tp2+sp": Layout(tensor=2, sequence=True),
    "pp2": Layout(pipeline=2),
    "tp2xpp2": Layout(tensor=2, pipeline=2),
    "dp2": Layout(data=2),
    "tp4+sp": Layout(tensor=4, sequence=True),
    "tp2xdp2": Layout(tensor=2, data=2),
}
# Tying matters where a pipeline holds the matrix twice, and where it is split.
CASES = [(name, False) for name in LAYOUTS] + [(name, True) for name in ("tp2", "pp2", "tp2xpp2")]
MICRO_BATCHES = (1, 2, 4)
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def model_dirs(tmp_path_factory):
    return {
        tied: write_qwen3(tmp_path_factory.mktemp("qwen3"), tied=tied) for tied in (False, True)
    }


def _one_step(model_dir, layout: Layout, micro_batch: int | None, *, dynamo: bool):
    """Loss, factors and gradients of one step, then the weights after SGD."""
    batch = random_batch()
    with policy_on(model_dir, layout) as policy:
        plan = plan_for(policy, batch, micro_batch_sequences=micro_batch)
        inputs, modulated, old = prepared(policy, batch, plan, dynamo=dynamo)
        policy.accumulate_gradients(plan[0], inputs)
        gradients = hf_gradients(policy)
        (update,) = policy.update(plan, inputs)
        return {
            "owned": old.owned,
            "factors": torch.stack([modulated.compensation, modulated.stabilization]),
            "range": modulated.ranges[0],
            "loss": update.loss,
            "grad_norm": update.grad_norm,
            "gradients": gradients,
            "weights": hf_weights(policy),
        }


def _three_adamw_steps(model_dir, layout: Layout, micro_batch: int | None, *, dynamo: bool):
    batch = random_batch()
    before, losses = None, []
    with policy_on(model_dir, layout, optimizer=optimizer_settings("adam")) as policy:
        before = hf_weights(policy)
        after_one = None
        for _ in range(3):
            plan = plan_for(policy, batch, micro_batch_sequences=micro_batch)
            inputs, _, _ = prepared(policy, batch, plan, dynamo=dynamo)
            losses.append(policy.update(plan, inputs)[0].loss)
            after_one = after_one or hf_weights(policy)
        return {name: after_one[name] - before[name] for name in before}, losses


def _combinations():
    return [(size, dynamo) for size in MICRO_BATCHES for dynamo in (False, True)]


@pytest.fixture(scope="module")
def references(model_dirs):
    """One rank, all sequences in as few rows as fit; by (tied, dynamo)."""

    def work():
        return {
            (tied, dynamo): (
                _one_step(model_dir, Layout(), None, dynamo=dynamo),
                _three_adamw_steps(model_dir, Layout(), None, dynamo=dynamo),
            )
            for tied, model_dir in model_dirs.items()
            for dynamo in (False, True)
        }

    return run_on_ranks(work, 1)[0]


@pytest.mark.parametrize(("name", "tied"), CASES)
def test_layout_and_micro_batches_change_nothing(name, tied, model_dirs, references):
    layout, model_dir = LAYOUTS[name], model_dirs[tied]

    def work():
        return {
            key: (
                _one_step(model_dir, layout, key[0], dynamo=key[1]),
                _three_adamw_steps(model_dir, layout, key[0], dynamo=key[1]),
            )
            for key in _combinations()
        }

    by_rank = run_on_ranks(work, layout.world_size, timeout=180)
    for key in _combinations():
        want, (want_change, want_losses) = references[tied, key[1]]
        owned = torch.stack([ranks[key][0]["owned"] for ranks in by_rank])
        assert owned.any(dim=0).all(), "every response token has an owner"
        for ranks in by_rank:
            got, (change, losses) = ranks[key]
            mine = got["owned"]
            torch.testing.assert_close(
                got["factors"][:, mine], want["factors"][:, mine], rtol=0, atol=TOLERANCE
            )
            assert got["loss"] == pytest.approx(want["loss"], abs=TOLERANCE)
            assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=TOLERANCE)
            assert relative_distance(got["gradients"], want["gradients"]) < TOLERANCE
            assert relative_distance(got["weights"], want["weights"]) < TOLERANCE
            assert losses == pytest.approx(want_losses, abs=1e-4)
            for tensor, wanted in want_change.items():
                distance = (change[tensor] - wanted).norm() / wanted.norm()
                assert distance < 1e-3, f"{tensor} moved differently by {distance:.1e}"
