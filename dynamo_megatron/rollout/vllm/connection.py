"""This process's connection to Ray: one that is started here, or a cluster's."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from dynamo_megatron.rollout.errors import RolloutError
from dynamo_megatron.rollout.vllm.limits import is_head_address
from dynamo_megatron.rollout.vllm.own_folder import RAY, make_folder
from dynamo_megatron.rollout.vllm.surroundings import quiet_start, visible
from dynamo_megatron.rollout.vllm.watch import require_listener

START_ATTEMPTS = 2
"""Ray gives its services 30 s to start, which a busy machine may not."""

logger = logging.getLogger(__name__)


def start_ray(*, num_cpus: int, gpu_ids: Sequence[str], object_store_bytes: int) -> str:
    """Start a Ray that listens on the loopback only, and connect to it.

    Args:
        num_cpus: that it may give out.
        gpu_ids: GPUs of this machine that it may give out.
        object_store_bytes: room for weights on their way.

    Returns:
        Its folder, to be removed after ``ray.shutdown``.

    Raises:
        RolloutError: it does not start, or this process has a connection already.
    """
    # Read by Ray when it is imported: node addresses are then the loopback's.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    for left in reversed(range(START_ATTEMPTS)):
        folder = make_folder(RAY)
        try:
            with quiet_start(), visible(gpu_ids), _own_process_group():
                _init(
                    address="local",
                    num_cpus=num_cpus,
                    num_gpus=len(gpu_ids),
                    object_store_memory=object_store_bytes,
                    _temp_dir=folder,
                    _node_ip_address="127.0.0.1",
                )
            return folder
        except BaseException as error:
            shutil.rmtree(folder, ignore_errors=True)
            if not (left and isinstance(error, RolloutError) and _may_pass(error.__cause__)):
                raise
            logger.warning("%s It is tried once more.", error)
    raise AssertionError("the last attempt returns or raises")


def join_ray(address: str) -> None:
    """Connect to a Ray that runs.

    Args:
        address: ``host:port``; or ``auto``: what RAY_ADDRESS names, or the only one on this node.

    Raises:
        RolloutError: none answers there, or ``auto`` names more than one.
    """
    found = _found() if address == "auto" else address
    try:
        require_listener(found)
    except OSError as error:
        raise _no_answer(address, found, error) from error
    with quiet_start():
        _init(address=found)
    logger.info("joined the Ray at %s", found)


def _found() -> str:
    """The address that ``auto`` means. Ray itself takes any that it finds."""
    named = os.environ.get("RAY_ADDRESS", "")
    if named and named != "auto":
        if not is_head_address(named):
            raise RolloutError(
                f"rollout.vllm.ray_address=auto takes RAY_ADDRESS={named}, which is no address of "
                "a Ray head: Ray's client (ray://) cannot place replicas beside a trainer. Set "
                "RAY_ADDRESS or rollout.vllm.ray_address to HOST:PORT."
            )
        return named
    from ray._private import services

    found = sorted(services.find_gcs_addresses())
    if len(found) == 1:
        return found[0]
    if not found:
        raise RolloutError(
            "rollout.vllm.ray_address=auto, but no Ray runs on this node, and RAY_ADDRESS is not "
            "set. Join the node to the cluster (ray start --address=HOST:PORT --num-gpus=0), or "
            "set rollout.vllm.ray_address=HOST:PORT of its head."
        )
    raise RolloutError(
        f"rollout.vllm.ray_address=auto, but {len(found)} Rays run on this node: "
        f"{', '.join(found)}. Set rollout.vllm.ray_address (or RAY_ADDRESS) to one of them."
    )


def _init(**arguments: Any) -> None:
    import ray

    if ray.is_initialized():
        raise RolloutError("this process is connected to a Ray already; end that one first.")
    address = arguments["address"]
    try:
        ray.init(
            include_dashboard=False if address == "local" else None,
            log_to_driver=False,
            logging_level=logging.ERROR,
            namespace=f"dynamo-megatron-{os.getpid()}",
            **arguments,
        )
    except Exception as error:  # Ray's services that do not start in time raise no narrower one
        ray.shutdown()
        if address == "local":
            advice = ""
            if not _may_pass(error):
                advice = (
                    " Ray keeps its token in ~/.ray/auth_token: HOME must be a folder that can be "
                    "written to, or set RAY_AUTH_TOKEN."
                )
            raise RolloutError(
                f"Ray could not be started on this machine: {error}.{advice}"
            ) from error
        raise _no_answer(address, address, error) from error


def _may_pass(error: BaseException | None) -> bool:
    """Whether a second attempt can help: a folder that cannot be written to stays so."""
    return not isinstance(error, OSError) or isinstance(error, TimeoutError)


def _no_answer(address: str, found: str, error: Exception) -> RolloutError:
    where = address if address == found else f"{address}, which is {found}"
    return RolloutError(
        f"no Ray answers at rollout.vllm.ray_address={where}: {str(error).strip()}. Check that "
        "its head runs there, that it is Ray of the same version, and that this process has its "
        "token (RAY_AUTH_TOKEN, or the file ~/.ray/auth_token)."
    )


@contextmanager
def _own_process_group() -> Iterator[None]:
    """While Ray starts: its processes leave this one's group.

    torchrun and a terminal signal the whole group. Ray has to last until the step is over and the
    checkpoint saved; it ends with this process all the same.
    """
    from ray._private import services

    kept = services.ConsolePopen
    services.ConsolePopen = partial(kept, process_group=0)
    try:
        yield
    finally:
        services.ConsolePopen = kept
