"""The description of the configuration keys, and the nearest of them."""

import pytest

from dynamo_megatron.config_keys import config_keys, nearest_keys
from dynamo_megatron.load_config import ConfigError, describe_config


def test_the_description_has_every_key_with_type_default_and_meaning():
    described = describe_config()
    assert "run.num_steps    (integer >= 1; required)\n    Steps of the loop" in described
    assert "optimizer.lr    (number > 0; default 1.0e-06)" in described
    assert "algorithm.clip.dual    (number > 1 or null; default 10.0)" in described
    assert "run.resume    (never | always | if_present; default never)" in described
    assert "# Sampling." in described
    leaves = [key.path for key in config_keys() if not key.is_section]
    assert [path for path in leaves if f"\n{path}    (" not in described] == []


def test_the_description_can_be_narrowed_to_a_section_or_a_key():
    described = describe_config("algorithm.clip")
    assert "algorithm.clip.low" in described
    assert "algorithm.kl" not in described
    assert describe_config("run.seed").startswith("run.seed    (integer >= 0; default 0)\n")
    with pytest.raises(ConfigError, match=r"no configuration key algorithm\.clp\. Did you mean"):
        describe_config("algorithm.clp")


def test_nearest_keys_of_nonsense_are_none():
    assert nearest_keys("qqqq", config_keys()) == []
