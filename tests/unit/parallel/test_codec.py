"""Rollouts and groups come back from bytes exactly as they were."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamo_megatron.parallel.codec import (
    decode_groups,
    decode_rollouts,
    encode_groups,
    encode_rollouts,
)
from dynamo_megatron.types import (
    FinishReason,
    Prompt,
    Rollout,
    RolloutGroup,
    Verdict,
    VerdictStatus,
)

int64 = st.integers(-(2**63), 2**63 - 1)
texts = st.text(max_size=12) | st.just("\ud800 lone surrogate") | st.just("é你\0")
logprobs = st.floats(allow_nan=False, max_value=0.0)


@st.composite
def rollouts_of(draw, prompt_id: str, index: int) -> Rollout:
    tokens = draw(st.lists(st.integers(0, 2**40), min_size=1, max_size=6))
    return Rollout(
        prompt_id=prompt_id,
        index=index,
        token_ids=tuple(tokens),
        logprobs=tuple(draw(logprobs) for _ in tokens),
        finish_reason=draw(st.sampled_from(FinishReason)),
        weight_version=draw(int64),
        seed=draw(st.integers(0, 2**63 - 1)),
        text=draw(texts),
    )


verdicts = st.builds(
    Verdict,
    reward=st.floats(allow_nan=False),
    status=st.sampled_from(VerdictStatus),
    formatted=st.booleans(),
    extracted=texts,
    message=texts,
)


@st.composite
def groups(draw) -> RolloutGroup:
    prompt = Prompt(
        id=draw(texts),
        text=draw(texts),
        token_ids=tuple(draw(st.lists(st.integers(0, 2**31), max_size=4))),
        answer=draw(texts),
        source=draw(texts),
    )
    size = draw(st.integers(0, 3))
    return RolloutGroup(
        prompt=prompt,
        rollouts=tuple(draw(rollouts_of(prompt.id, k)) for k in range(size)),
        verdicts=tuple(draw(verdicts) for _ in range(size)),
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(rollouts_of("p", 0), max_size=4))
def test_rollouts_come_back_exactly(rollouts):
    assert decode_rollouts(encode_rollouts(rollouts)) == rollouts


@settings(max_examples=60, deadline=None)
@given(st.lists(groups(), max_size=4))
def test_groups_come_back_exactly(many):
    back = decode_groups(encode_groups(many))
    assert back == many
    assert all(type(r.token_ids[0]) is int for g in back for r in g.rollouts)
    assert all(type(v.formatted) is bool for g in back for v in g.verdicts)


def test_nothing_is_a_payload_too():
    assert decode_rollouts(encode_rollouts([])) == []
    assert decode_groups(encode_groups([])) == []


def test_a_payload_of_another_kind_is_refused():
    with pytest.raises(ValueError, match=r"kind 'rollouts/1' was expected and 'rollout groups/1'"):
        decode_rollouts(encode_groups([]))
    with pytest.raises(ValueError, match="was expected and None came"):
        decode_groups(b'{"json": true, "and": "long enough"}')
