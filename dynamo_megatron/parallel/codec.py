"""Rollouts as bytes and back, exactly.

The format is safetensors: flat arrays over all tokens with the length of each sequence beside
them. Nothing loops over tokens in Python, and reading a payload runs no code. Texts are arrays
too, because a safetensors header is limited to 100 MB.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain, pairwise

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from dynamo_megatron.types import (
    FinishReason,
    Prompt,
    Rollout,
    RolloutGroup,
    Verdict,
    VerdictStatus,
)

FINISH_REASONS = tuple(FinishReason)
STATUSES = tuple(VerdictStatus)
ROLLOUTS, GROUPS = "rollouts/1", "rollout groups/1"

Arrays = dict[str, NDArray]


def encode_rollouts(rollouts: Sequence[Rollout]) -> bytes:
    """All fields of the rollouts, in order. ``decode_rollouts`` inverts it exactly."""
    return save(_rollout_arrays(rollouts), metadata={"kind": ROLLOUTS})


def decode_rollouts(payload: bytes) -> list[Rollout]:
    """The rollouts that ``encode_rollouts`` was given.

    Raises:
        ValueError: the payload is something else.
    """
    _require_kind(payload, ROLLOUTS)
    return _rollouts(load(payload))


def encode_groups(groups: Sequence[RolloutGroup]) -> bytes:
    """All fields of the groups: prompts, rollouts, verdicts. ``decode_groups`` inverts it."""
    prompts = [group.prompt for group in groups]
    verdicts = [verdict for group in groups for verdict in group.verdicts]
    arrays = _rollout_arrays([rollout for group in groups for rollout in group.rollouts])
    arrays["group.sizes"] = _ints(len(group.rollouts) for group in groups)
    for field in ("id", "text", "answer", "source"):
        _put_strings(arrays, f"prompt.{field}", [_field(prompt, field) for prompt in prompts])
    _put_ragged(arrays, "prompt.token_ids", [p.token_ids for p in prompts], np.int64)
    arrays["verdict.reward"] = np.array([v.reward for v in verdicts], dtype=np.float64)
    arrays["verdict.status"] = _ints(STATUSES.index(v.status) for v in verdicts)
    arrays["verdict.formatted"] = np.array([v.formatted for v in verdicts], dtype=np.bool_)
    for field in ("extracted", "message"):
        _put_strings(arrays, f"verdict.{field}", [_field(v, field) for v in verdicts])
    return save(arrays, metadata={"kind": GROUPS})


def decode_groups(payload: bytes) -> list[RolloutGroup]:
    """The groups that ``encode_groups`` was given.

    Raises:
        ValueError: the payload is something else, or a group contradicts itself.
    """
    _require_kind(payload, GROUPS)
    arrays = load(payload)
    rollouts, verdicts = _rollouts(arrays), _verdicts(arrays)
    prompts = [
        Prompt(id=id_, text=text, token_ids=tuple(token_ids), answer=answer, source=source)
        for id_, text, token_ids, answer, source in zip(
            _strings(arrays, "prompt.id"),
            _strings(arrays, "prompt.text"),
            _ragged(arrays, "prompt.token_ids"),
            _strings(arrays, "prompt.answer"),
            _strings(arrays, "prompt.source"),
            strict=True,
        )
    ]
    spans = pairwise(accumulate(arrays["group.sizes"].tolist(), initial=0))
    return [
        RolloutGroup(
            prompt=prompt,
            rollouts=tuple(rollouts[start:stop]),
            verdicts=tuple(verdicts[start:stop]),
        )
        for prompt, (start, stop) in zip(prompts, spans, strict=True)
    ]


def _rollout_arrays(rollouts: Sequence[Rollout]) -> Arrays:
    arrays: Arrays = {
        "index": _ints(r.index for r in rollouts),
        "weight_version": _ints(r.weight_version for r in rollouts),
        "seed": _ints(r.seed for r in rollouts),
        "finish_reason": _ints(FINISH_REASONS.index(r.finish_reason) for r in rollouts),
    }
    _put_ragged(arrays, "token_ids", [r.token_ids for r in rollouts], np.int64)
    # float64, so that any Python float comes back as it was; an engine's float32 values do too.
    _put_ragged(arrays, "logprobs", [r.logprobs for r in rollouts], np.float64)
    _put_strings(arrays, "prompt_id", [r.prompt_id for r in rollouts])
    _put_strings(arrays, "text", [r.text for r in rollouts])
    return arrays


def _rollouts(arrays: Mapping[str, NDArray]) -> list[Rollout]:
    return [
        Rollout(
            prompt_id=prompt_id,
            index=index,
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs),
            finish_reason=FINISH_REASONS[reason],
            weight_version=version,
            seed=seed,
            text=text,
        )
        for prompt_id, index, token_ids, logprobs, reason, version, seed, text in zip(
            _strings(arrays, "prompt_id"),
            arrays["index"].tolist(),
            _ragged(arrays, "token_ids"),
            _ragged(arrays, "logprobs"),
            arrays["finish_reason"].tolist(),
            arrays["weight_version"].tolist(),
            arrays["seed"].tolist(),
            _strings(arrays, "text"),
            strict=True,
        )
    ]


def _verdicts(arrays: Mapping[str, NDArray]) -> list[Verdict]:
    return [
        Verdict(
            reward=reward,
            status=STATUSES[status],
            formatted=formatted,
            extracted=extracted,
            message=message,
        )
        for reward, status, formatted, extracted, message in zip(
            arrays["verdict.reward"].tolist(),
            arrays["verdict.status"].tolist(),
            arrays["verdict.formatted"].tolist(),
            _strings(arrays, "verdict.extracted"),
            _strings(arrays, "verdict.message"),
            strict=True,
        )
    ]


def _field(value: Prompt | Verdict, name: str) -> str:
    return getattr(value, name)


def _ints(values: Iterable[int]) -> NDArray:
    return np.fromiter(values, dtype=np.int64)


def _put_ragged(arrays: Arrays, name: str, rows: Sequence[Sequence], dtype: type) -> None:
    lengths = _ints(len(row) for row in rows)
    arrays[f"{name}.lengths"] = lengths
    arrays[f"{name}.flat"] = np.fromiter(
        chain.from_iterable(rows), dtype=dtype, count=int(lengths.sum())
    )


def _ragged(arrays: Mapping[str, NDArray], name: str) -> list[list]:
    flat = arrays[f"{name}.flat"].tolist()
    spans = pairwise(accumulate(arrays[f"{name}.lengths"].tolist(), initial=0))
    return [flat[start:stop] for start, stop in spans]


def _put_strings(arrays: Arrays, name: str, strings: Sequence[str]) -> None:
    # surrogatepass: a decoded response may hold a lone surrogate, which strict UTF-8 refuses.
    encoded = [string.encode("utf-8", "surrogatepass") for string in strings]
    arrays[f"{name}.lengths"] = _ints(len(part) for part in encoded)
    arrays[f"{name}.utf8"] = np.frombuffer(b"".join(encoded), dtype=np.uint8)


def _strings(arrays: Mapping[str, NDArray], name: str) -> list[str]:
    joined = arrays[f"{name}.utf8"].tobytes()
    spans = pairwise(accumulate(arrays[f"{name}.lengths"].tolist(), initial=0))
    return [joined[start:stop].decode("utf-8", "surrogatepass") for start, stop in spans]


def _require_kind(payload: bytes, kind: str) -> None:
    """Read the metadata of a safetensors payload: an 8-byte length, then a JSON header."""
    header_length = int.from_bytes(payload[:8], "little")
    found = None
    if header_length <= len(payload) - 8:
        header = json.loads(payload[8 : 8 + header_length])
        found = header.get("__metadata__", {}).get("kind")
    if found != kind:
        raise ValueError(
            f"a payload of kind {kind!r} was expected and {found!r} came: the sender encoded "
            "another type, or the ranks are at different broadcasts."
        )
