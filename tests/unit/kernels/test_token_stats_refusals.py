"""Bad input of the token statistics is refused with its values."""

import pytest
import torch

from dynamo_megatron.kernels import token_stats


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets_T": torch.tensor([0, 5])}, "target 5 at row 1 is outside the vocabulary of 5"),
        ({"targets_T": torch.tensor([0])}, "targets must be \\[2\\] int64"),
        ({"targets_T": torch.tensor([0, 1], dtype=torch.int32)}, "int64"),
        ({"temperature": 0.0}, "temperature must be positive, got 0.0"),
        ({"temperature": torch.tensor([1.0, -1.0])}, "temperature -1.0 at row 1"),
        ({"temperature": torch.ones(3)}, "temperature must be a float or \\[2\\]"),
        ({"logits_TVp": torch.zeros(8, 2).t()}, "strides \\(1, 2\\)"),
        ({"logits_TVp": torch.zeros(2, 1, 8)}, "must be a \\[T, n\\] float tensor"),
        ({"vocab_size": 9}, "cover 8 of 9 ids.*group"),
        ({"vocab_start": 8}, "leaves ids 0..7 to other ranks"),
        ({"logits_TVp": torch.zeros(2, 8, dtype=torch.float64), "impl": "torch"}, "float64"),
        ({"impl": "fast"}, "impl='fast' is not available"),
    ],
)
def test_bad_input_is_refused_with_its_values(change, message):
    arguments = {
        "logits_TVp": torch.zeros(2, 8),
        "targets_T": torch.tensor([0, 1]),
        "vocab_size": 5,
    }
    with pytest.raises(ValueError, match=message):
        token_stats(**(arguments | change))
