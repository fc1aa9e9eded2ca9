"""The schedule's configuration: what cannot work is refused with what to change."""

import pytest
from pydantic import ValidationError

from dynamo_megatron.config import Config, RolloutConfig


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


@pytest.mark.parametrize("value", [0.001, 2.5])
@pytest.mark.parametrize("section", ["rollout", "evaluation"])
def test_temperatures_that_vllm_does_not_sample_at_are_refused_before_it_starts(section, value):
    values = {
        "run": {"dir": "runs/x", "num_steps": 1},
        "model": {"path": "builtin:tiny"},
        "data": {"train": [{"kind": "arithmetic", "split": "train", "num_problems": 8}]},
        "rollout": {"engine": "vllm"},
    }
    assert Config.model_validate(values).rollout.engine == "vllm"
    values[section] = values.get(section, {}) | {"temperature": value}
    with pytest.raises(ValidationError, match=rf"{section}\.temperature={value:g}: vLLM samples"):
        Config.model_validate(values)
    values["rollout"] = values["rollout"] | {"engine": "hf"}
    Config.model_validate(values)
