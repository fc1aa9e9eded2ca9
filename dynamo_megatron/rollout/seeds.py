"""The seed of a rollout: a function of what is sampled, never of where or with what beside it."""

from __future__ import annotations

import hashlib

SEED_BITS = 63


def rollout_seed(run_seed: int, step: int, prompt_id: str, k: int) -> int:
    """Seed of the k-th rollout of a prompt at a step.

    Engines that derive seeds from a replica or chunk index sample the same response twice, or
    another one when the cluster's size changes (verl#5179, vllm#11953, verl#6857).

    Returns:
        An integer in [0, 2**63), the same on every machine; distinct arguments give distinct seeds
        but for the chance collisions of a 63-bit hash (2e-10 in a step of 65,536 rollouts).
    """
    # repr keeps the fields apart: ("1", 12) and ("11", 2) must not meet.
    key = repr((run_seed, step, prompt_id, k)).encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(key, digest_size=8).digest()
    return int.from_bytes(digest, "big") >> (64 - SEED_BITS)
