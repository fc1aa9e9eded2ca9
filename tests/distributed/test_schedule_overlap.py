"""The next rollouts are sampled beside the update, and a failure there ends every rank."""

from __future__ import annotations

import threading

from dynamo_megatron.parallel.errors import PeerError
from dynamo_megatron.rollout.errors import RolloutError
from tests.ranks import run_on_ranks
from tests.schedules import Trained, Watched, config_at, rows_of, run


def test_the_next_rollouts_are_sampled_while_the_present_ones_are_trained_on(tmp_path):
    """Each side waits for the other to be in the middle of its work."""
    config = config_at(tmp_path, "run", mode="one_step_off", run__num_steps=2)

    def work():
        generating, updating = threading.Event(), threading.Event()

        def meet(mine: threading.Event, other: threading.Event) -> None:
            mine.set()
            assert other.wait(30.0), "generation and update do not overlap"

        def before_update() -> None:
            if not updating.is_set():
                meet(updating, generating)

        state, _ = run(
            config,
            engine=lambda engine: Watched(engine, before={1: lambda: meet(generating, updating)}),
            policy=lambda policy: Trained(policy, before_update=before_update),
        )
        return state.step

    assert run_on_ranks(work, 1, timeout=120) == [2]


def test_a_failure_in_the_background_ends_every_rank(tmp_path):
    config = config_at(tmp_path, "run", mode="one_step_off", parallel__tensor=2)

    def fail() -> None:
        raise RolloutError("a replica is lost")

    def work():
        try:
            run(config, engine=lambda engine: Watched(engine, before={2: fail}))
        except RolloutError as error:
            return "RolloutError", str(error)
        except PeerError as error:
            return error.error_type, error.error_text
        return None

    assert run_on_ranks(work, 2, timeout=120) == [("RolloutError", "a replica is lost")] * 2
    assert len(rows_of(tmp_path / "run")) == 1, "step 0 is done, step 1 is not reported"
