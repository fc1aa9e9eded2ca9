"""The schedule's configuration: what cannot work is refused with what to change."""

import pytest
from pydantic import ValidationError

from dynamo_megatron.config import RolloutConfig


def test_the_default_trains_on_rollouts_of_the_present_weights():
    assert RolloutConfig().mode == "sync"


def test_overlap_with_the_embedded_engine_is_refused_with_both_ways_out():
    with pytest.raises(ValidationError) as caught:
        RolloutConfig(mode="one_step_off")
    message = str(caught.value)
    for words in ("rollout.engine=hf", "rollout.mode=sync", "rollout.engine=vllm", "overlap"):
        assert words in message


def test_overlap_with_an_engine_of_its_own_is_accepted():
    assert RolloutConfig(mode="one_step_off", engine="vllm").mode == "one_step_off"


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValidationError, match="one_step_off"):
        RolloutConfig(mode="two_steps_off")
