"""The published problem sets, where they lie beside the project; they are not part of it."""

from collections import Counter
from pathlib import Path

import pytest

from dynamo_megatron.config import FileSource
from dynamo_megatron.data.files import read_problem_file
from dynamo_megatron.data.sources import load_problems

FOLDER = Path(__file__).parents[4] / "shared" / "data"
pytestmark = pytest.mark.skipif(
    not FOLDER.is_dir(), reason=f"the published problem sets are not in {FOLDER}"
)


@pytest.mark.parametrize(
    ("name", "count", "some"),
    [
        ("aime", 30, {0: "204", 1: "025", 15: "073"}),
        ("amc", 83, {0: "142", 1: "144", 8: "-4"}),
        ("math", 500, {0: "\\left( 3, \\frac{\\pi}{2} \\right)", 1: "p - q"}),
        ("gsm8k", 1319, {0: "18", 1: "3", 2: "70000"}),
    ],
)
def test_every_problem_of_the_published_sets_is_read(name, count, some):
    records = list(read_problem_file(FOLDER / f"{name}.json", kind="json"))
    assert len(records) == count
    assert {k: records[k].answer for k in some} == some


def test_the_published_sets_hold_no_duplicate_but_these():
    sources = [
        FileSource(kind="json", path=str(FOLDER / f"{name}.json"))
        for name in ("aime", "amc", "math", "gsm8k")
    ]
    loaded = load_problems(sources)
    assert Counter(loaded.counts) + Counter({"duplicates": loaded.duplicates}) == Counter(
        {"aime": 30, "amc": 83, "math": 500, "gsm8k": 1319}
    )
    assert loaded.contradictions == 0
