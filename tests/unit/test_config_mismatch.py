"""Configuration of the mismatch: what cannot work, or would be biased unknown, is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from dynamo_megatron.config import CorrectionConfig
from dynamo_megatron.load_config import ConfigError, load_config, to_yaml

GOOD = """\
run: {dir: runs/a, num_steps: 3}
model: {path: "builtin:tiny"}
data: {train: [{kind: arithmetic, num_problems: 5, split: train}]}
"""


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "good.yaml"
    path.write_text(GOOD)
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    (problem,) = [line for line in str(caught.value).splitlines() if line.startswith("  - ")]
    return problem.removeprefix("  - ")


def test_no_correction_and_the_trainers_old_policy_are_the_default(good: Path):
    algorithm = load_config(good).algorithm
    assert algorithm.correction.kind == "none"
    assert algorithm.old_logp == "trainer"


@pytest.mark.parametrize(
    ("kind", "mean", "band"),
    [
        ("masked", "geometric", (0.5, 5.0)),
        ("sequence_masked", "geometric", (0.999, 1.002)),
        ("sequence_masked", "product", (0.5, 2.0)),
    ],
)
def test_each_band_has_a_default_of_its_own(kind, mean, band):
    assert CorrectionConfig(kind=kind, sequence_ratio=mean).band == band
    assert CorrectionConfig(kind=kind, sequence_ratio=mean, low=0.0).band == (0.0, band[1])
    assert CorrectionConfig(kind=kind, sequence_ratio=mean, high=3.0).band == (band[0], 3.0)


def test_the_cap_is_two_unless_given():
    assert CorrectionConfig(kind="truncated").cap_or_default == 2.0
    assert CorrectionConfig(kind="sequence", cap=5.0).cap_or_default == 5.0


@pytest.mark.parametrize("kind", ["truncated", "masked", "sequence", "sequence_masked"])
def test_every_correction_may_have_a_veto_and_survives_its_file(good: Path, kind: str):
    overrides = [f"algorithm.correction={{kind: {kind}, veto: 1e-4}}"]
    config = load_config(good, overrides)
    good.write_text(to_yaml(config))
    assert load_config(good) == config


@pytest.mark.parametrize(
    ("values", "name", "remedy"),
    [
        ("{cap: 3.0}", "cap=3.0", "Set kind to truncated or sequence"),
        ("{kind: masked, cap: 3.0}", "cap=3.0", "Set kind to truncated or sequence"),
        ("{kind: truncated, low: 0.3}", "low=0.3", "Set kind to masked or sequence_masked"),
        ("{kind: sequence, high: 3.0}", "high=3.0", "Set kind to masked or sequence_masked"),
        ("{veto: 1e-4}", "veto=0.0001", "or veto to null"),
    ],
)
def test_a_number_that_the_kind_does_not_look_at_is_refused(good: Path, values, name, remedy):
    problem = refusal(good, f"algorithm.correction={values}")
    assert problem.startswith(f"algorithm.correction.{name} with algorithm.correction.kind=")
    assert remedy in problem


def test_a_sequence_ratio_that_the_kind_does_not_look_at_is_refused(good: Path):
    problem = refusal(good, "algorithm.correction={kind: sequence, sequence_ratio: product}")
    assert "kind=sequence: only sequence_masked chooses" in problem


@pytest.mark.parametrize(
    "override",
    [
        "algorithm.correction={kind: truncated, cap: 0.9}",
        "algorithm.correction={kind: masked, low: 1.1}",
        "algorithm.correction={kind: masked, high: 0.9}",
        "algorithm.correction={kind: masked, veto: 0}",
        "algorithm.correction={kind: masked, veto: 1}",
        "algorithm.correction={kind: icepop}",
    ],
)
def test_weights_that_would_change_engines_that_agree_are_refused(good: Path, override: str):
    assert "algorithm.correction" in refusal(good, override)


@pytest.mark.parametrize("kind", ["truncated", "masked", "sequence", "sequence_masked"])
def test_bypass_with_a_correction_is_refused(good: Path, kind: str):
    load_config(good, ["algorithm.old_logp=sampler"])
    problem = refusal(good, "algorithm.old_logp=sampler", f"algorithm.correction.kind={kind}")
    assert f"algorithm.old_logp=sampler with algorithm.correction.kind={kind}" in problem
    assert "Set algorithm.correction.kind=none or algorithm.old_logp=trainer." in problem


CUTS = ["rollout.top_p=0.95", "rollout.top_k=20"]


@pytest.mark.parametrize("cut", CUTS)
def test_a_cut_distribution_is_refused_unless_its_bias_is_accepted(good: Path, cut: str):
    problem = refusal(good, "rollout.engine=vllm", cut)
    assert cut in problem
    assert "off by the mass that the cut keeps" in problem
    assert "rollout.accept_truncation_bias=true" in problem
    accepted = load_config(
        good, ["rollout.engine=vllm", cut, "rollout.accept_truncation_bias=true"]
    )
    assert accepted.rollout.accept_truncation_bias


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("accept", ["true", "false"])
def test_the_embedded_engine_refuses_a_cut_it_would_not_make(good: Path, cut: str, accept: str):
    problem = refusal(good, cut, f"rollout.accept_truncation_bias={accept}")
    assert cut in problem and "rollout.engine=hf" in problem


@pytest.mark.parametrize("value", ["rollout.top_p=0", "rollout.top_p=1.1", "rollout.top_k=-1"])
def test_a_cut_that_is_none_is_refused(good: Path, value: str):
    assert refusal(good, value).startswith(value.partition("=")[0])
