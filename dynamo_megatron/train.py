"""``python -m dynamo_megatron.train --config FILE [a.b=value ...]``, alone or under torchrun."""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from dynamo_megatron.cli import config_from_arguments
from dynamo_megatron.config import Config

logger = logging.getLogger(__name__)

FAILED = 1
"""Exit code of a run that ended with an error."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one training from the command line.

    Returns:
        0 when the run is done (or stopped on SIGTERM with a checkpoint), 1 after an error. Errors
        that a user can do something about are one message; others come with a traceback.
    """
    config = config_from_arguments(argv)
    report = _Report(int(os.environ.get("RANK", "0")), Path(config.run.dir))
    try:
        _open_run_dir(report.rank, report.run_dir)
        run(config, on_failure=report)
    except (OSError, ValueError, RuntimeError) as error:
        report(error)
        return FAILED
    return 0


class _Report:
    """Logs the failure of a run, once: at once where it happens, or at the latest at the end.

    Closing an engine takes seconds, in which a launcher that saw another rank end ends this one.
    """

    def __init__(self, rank: int, run_dir: Path) -> None:
        self.rank = rank
        self.run_dir = run_dir
        self._reported: BaseException | None = None

    def __call__(self, error: BaseException) -> None:
        from dynamo_megatron.parallel.errors import PeerError

        if error is self._reported:
            return
        self._reported = error
        if isinstance(error, PeerError):
            logger.error("rank %d stops: %s", self.rank, error)
        elif isinstance(error, OSError):
            logger.error("%s%s", error, _advice(error, self.run_dir))
        else:
            own = type(error).__module__.startswith("dynamo_megatron.")
            known = own or isinstance(error, ValueError)
            logger.error("%s", error, exc_info=None if known else error)


def _advice(error: OSError, run_dir: Path) -> str:
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return ""
    return (
        f": there is no room left for what the run writes under {run_dir}. What was saved is "
        "intact: free some space and go on with run.resume=if_present."
    )


def _open_run_dir(rank: int, run_dir: Path) -> None:
    from dynamo_megatron.observe.logging import setup_logging

    try:
        setup_logging(rank, run_dir)
    except OSError as error:
        setup_logging(rank)  # without the file, so that this can be said
        raise OSError(
            f"run.dir={run_dir} cannot be written ({error.strerror}): everything the run leaves "
            "goes there. Set run.dir to a folder that you may write to."
        ) from None


def run(config: Config, on_failure: Callable[[BaseException], None] | None = None) -> None:
    """Train as configured. Collective: every rank of the launch calls it.

    Args:
        config: the run's.
        on_failure: told of an error of the training before anything is closed because of it.
    """
    import megatron_patches

    megatron_patches.apply()
    import torch
    import torch.distributed as dist
    from transformers.utils import logging as hf_logging

    from dynamo_megatron.actor.topology import check_layout, init_torch_distributed
    from dynamo_megatron.parallel.control import ControlPlane
    from dynamo_megatron.signals import StopSignal

    parallel = config.parallel
    check_layout(
        tensor=parallel.tensor,
        pipeline=parallel.pipeline,
        world_size=int(os.environ.get("WORLD_SIZE", "1")),
    )
    hf_logging.disable_progress_bar()  # a bar for a second's work reads like an error in a log
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    stop = StopSignal()
    store = init_torch_distributed()
    group = dist.group.WORLD
    assert group is not None, "init_torch_distributed makes it"
    with ControlPlane(store, group=group, timeout_s=config.run.heartbeat_timeout_s) as control:
        stop.install(control.hurry)
        _run(config, control, stop, on_failure)
    dist.destroy_process_group()


def _run(config: Config, control, stop, on_failure) -> None:
    from dynamo_megatron import build
    from dynamo_megatron.actor.topology import init_topology
    from dynamo_megatron.load_config import to_yaml, write_resolved
    from dynamo_megatron.loop import train
    from dynamo_megatron.parallel.digest import require_agreement

    control.set_phase("read the inputs")
    inputs = build.read_inputs(config)
    require_agreement(
        {
            "configuration": hashlib.sha256(to_yaml(config).encode()).hexdigest(),
            "training prompts": inputs.train.digest(),
        },
        step=0,
        group=control.group,
    )
    control.set_phase("build the policy")
    topology = init_topology(
        tensor=config.parallel.tensor, pipeline=config.parallel.pipeline, seed=config.run.seed
    )
    policy = build.build_policy(config, inputs, topology)
    checkpointer = build.build_checkpointer(config, inputs, policy)
    build.load_start_weights(config, policy, checkpointer)
    state, saved_step = _resume(config, checkpointer)
    if _nothing_left(config, inputs, state, saved_step):
        return _finish(config, inputs, policy, checkpointer, state)
    with ExitStack() as closing:
        tier = _build_tier(config, inputs, topology, control)
        closing.callback(tier.close)
        try:
            if topology.rank == 0:
                write_resolved(config, config.run.dir)
            parts = build.build_parts(config, inputs, policy, checkpointer, tier, state, stop)
            closing.callback(parts.recorder.close)
            control.set_phase("train")
            state = train(parts, state, saved_step=saved_step)
        except Exception as error:
            if on_failure is not None and not control.blames_another(error):
                on_failure(error)
            control.fail(error)
            raise
    _finish(config, inputs, policy, checkpointer, state)


def _nothing_left(config: Config, inputs, state, saved_step: int | None) -> bool:
    """A run that is done needs no rollout tier, which may take minutes to start."""
    measured = not inputs.heldout or state.evaluated(state.step) is not None
    return state.step >= config.run.num_steps and saved_step == state.step and measured


def _finish(config: Config, inputs, policy, checkpointer, state) -> None:
    """Export the policy of a run that is done, and say what there is."""
    from dynamo_megatron.checkpoint.export import export_once
    from dynamo_megatron.summary import summarize

    if config.checkpoint.export_hf and state.step >= config.run.num_steps:
        export = Path(config.run.dir) / "hf" / f"step_{state.step:06d}"
        export_once(policy, inputs.model_dir, export, source=checkpointer.latest())
    if policy.topology.rank == 0:
        logger.info("%s", summarize(Path(config.run.dir), state, config.run.num_steps))


def _build_tier(config: Config, inputs, topology, control):
    """Rank 0's engine and reward workers; a failure there ends all ranks."""
    from dynamo_megatron import build
    from dynamo_megatron.parallel.reduce import raise_together

    failure = tier = None
    try:
        tier = build.build_tier(config, inputs, topology, control)
    except Exception as error:
        failure = error
    raise_together(failure, phase="build the rollout tier", group=topology.world_group)
    assert tier is not None, "a failure was raised above"
    return tier


def _resume(config: Config, checkpointer):
    """The state to start from and the step of its checkpoint, as ``run.resume`` asks."""
    from dynamo_megatron.load_config import changed_keys
    from dynamo_megatron.state import LoopState

    mode, latest = config.run.resume, checkpointer.latest()
    if mode == "never" and latest is not None:
        raise ValueError(
            f"{config.run.dir} holds a run already (checkpoint {latest.name}), and "
            "run.resume=never would mix two runs. Set run.resume=if_present to go on with it, or "
            "another run.dir."
        )
    if mode == "always" and latest is None:
        raise ValueError(
            f"run.resume=always, but {checkpointer.directory} holds no complete checkpoint. Check "
            "run.dir, or set run.resume=if_present to start from model.path."
        )
    if latest is None:
        return LoopState(), None
    saved = checkpointer.load(latest)
    state = LoopState.from_json(saved, checkpointer.load_rollouts(latest))
    logger.info("resumed from %s: %d steps done", latest, state.step)
    if changed := changed_keys(latest / "config.yaml", config):
        logger.warning("the configuration is not the checkpoint's: %s", "; ".join(changed))
    if state.step >= config.run.num_steps:
        logger.info("nothing to train: run.num_steps=%d", config.run.num_steps)
    return state, state.step


if __name__ == "__main__":
    sys.exit(main())
