"""Which token statistics carry a gradient, where it is written, and what is saved for it."""

import pytest
import torch

from dynamo_megatron.kernels import token_stats


def test_second_backward_raises_after_the_gradient_took_the_logits_place():
    leaf = torch.randn(4, 9, requires_grad=True)
    got = token_stats(leaf * 1, torch.tensor([0, 1, 2, 3]), vocab_size=9)
    got.logp.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        got.logp.sum().backward()


def test_second_backward_works_out_of_place():
    leaf = torch.randn(4, 9, requires_grad=True)
    got = token_stats(leaf * 1, torch.tensor([0, 1, 2, 3]), vocab_size=9, inplace_backward=False)
    got.logp.sum().backward(retain_graph=True)
    once = leaf.grad.clone()
    got.logp.sum().backward()
    torch.testing.assert_close(leaf.grad, 2 * once)


def test_in_place_gradient_is_the_logits_storage_and_a_leaf_keeps_its_values():
    logits = torch.randn(4, 9)
    leaf = logits.clone().requires_grad_()
    hidden = leaf * 1
    got = token_stats(hidden, torch.tensor([0, 1, 2, 3]), vocab_size=9)
    (grad,) = torch.autograd.grad(got.logp.sum(), hidden)
    assert grad.data_ptr() == hidden.data_ptr()

    got = token_stats(leaf, torch.tensor([0, 1, 2, 3]), vocab_size=9)
    got.logp.sum().backward()
    torch.testing.assert_close(leaf.detach(), logits, rtol=0, atol=0)
    torch.testing.assert_close(leaf.grad, grad)


def test_only_logp_and_wanted_entropy_carry_a_gradient():
    leaf = torch.randn(2, 5, requires_grad=True)
    for entropy_grad in (True, False):
        got = token_stats(leaf, torch.tensor([0, 1]), vocab_size=5, entropy_grad=entropy_grad)
        assert got.logp.requires_grad
        assert got.entropy.requires_grad is entropy_grad
        assert not any(t.requires_grad for t in (got.lam, got.sum_pi2, got.q))


@pytest.mark.parametrize("entropy_grad", [True, False])
def test_no_vocabulary_sized_tensor_but_the_logits_is_saved(entropy_grad):
    # slime#1523: an unused entropy kept [T, V] tensors for the backward.
    leaf = torch.randn(6, 4096, requires_grad=True)
    logits = leaf * 1
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        token_stats(logits, torch.arange(6), vocab_size=4096, entropy_grad=entropy_grad)
    others = [t for t in saved if t.data_ptr() != logits.data_ptr()]
    assert len(others) < len(saved)
    assert sum(t.numel() for t in others) <= 8 * 6
    with torch.no_grad():
        assert token_stats(logits, torch.arange(6), vocab_size=4096).logp.grad_fn is None
