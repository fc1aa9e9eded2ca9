"""The compiled row functions. Run by test_own_process.py in a process of its own: compiling starts
threads, and tests that fork come later.
"""

import pytest
import torch

from dynamo_megatron.kernels import token_stats
from tests.unit.kernels.problems import dense_stats, hostile_problem, ulp

FIELDS = ("logp", "entropy", "lam", "sum_pi2", "q")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, inside its compiler
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_rows_equal_dense_float64(dtype):
    problem = hostile_problem(ranks=1, dtype=dtype, width=700)
    want, want_grad = dense_stats(problem, 0.7)
    leaf = problem.logits.clone().requires_grad_()
    got = token_stats(
        leaf * 1,
        problem.targets,
        temperature=0.7,
        vocab_size=problem.vocab_size,
        impl="torch_compile",
    )
    (got.logp * problem.g + got.entropy * problem.k).sum().backward()
    for name in FIELDS:
        bound = torch.maximum(torch.tensor(4e-6), 2 * ulp(want[name]))
        assert (getattr(got, name).double() - want[name]).abs().le(bound).all(), name
    bound = 2e-6 if dtype is torch.float32 else ulp(want_grad, dtype) + 2e-6
    assert (leaf.grad.double() - want_grad).abs().le(bound).all()
