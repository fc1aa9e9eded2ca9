"""Memory of the token statistics. Run by test_own_process.py in a process of its own: what earlier
tests left in the allocator would hide what is measured here.
"""

import torch

from benchmarks.memory_probe import peak_above_now
from dynamo_megatron.kernels import token_stats, token_stats_linear

MIB = 1 << 20


def _held_bytes(stats, logits):
    """Bytes the graph keeps, besides the logits themselves."""
    saved = {t.data_ptr(): t for t in stats.logp.grad_fn.saved_tensors}
    del saved[logits.data_ptr()]
    return sum(t.numel() * t.element_size() for t in saved.values())


def test_a_step_holds_next_to_nothing_and_peaks_at_next_to_nothing_above_the_logits():
    tokens, columns = 2048, 16384
    elements = tokens * columns
    leaf = torch.empty(tokens, columns, dtype=torch.bfloat16)
    for row in leaf:
        row.normal_()
    logits = leaf.requires_grad_().view(tokens, columns)  # not a leaf: the gradient goes in place
    targets = torch.arange(tokens)
    weight = torch.randn(tokens)

    def step(logits):
        stats = token_stats(logits, targets, temperature=0.9, vocab_size=columns)
        loss = (stats.logp * weight).sum() - 0.01 * stats.entropy.sum()
        torch.autograd.grad(loss, logits)
        return stats

    small = torch.randn(4, 64, dtype=torch.bfloat16).requires_grad_().view(4, 64)
    stats = token_stats(small, targets[:4], vocab_size=64)  # loads what is loaded once
    torch.autograd.grad(stats.logp.sum(), small)

    _, peak = peak_above_now(lambda: step(logits))
    stats = token_stats(logits.detach().requires_grad_(), targets, vocab_size=columns)
    held = _held_bytes(stats, logits)
    print(f"held {held / elements:.4f}, peak {peak / elements:.4f} bytes an element")
    assert held <= 0.1 * elements
    assert peak <= 0.3 * elements


def _linear_peak(tokens, columns, width=32):
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(columns, width, requires_grad=True)
    weight.main_grad = torch.zeros(columns, width)
    targets = torch.arange(tokens) % columns

    def step():
        stats = token_stats_linear(hidden, weight, targets, vocab_size=columns)
        (stats.logp.sum() + 0.1 * stats.entropy.sum()).backward()

    _, peak = peak_above_now(step)
    gradients = hidden.numel() * 4 + weight.numel() * 4  # they are results
    return peak - gradients


def test_the_fused_heads_peak_does_not_grow_with_tokens_or_vocabulary():
    # 32 MiB of logits at a time and 2 MiB of scratch, where all of them would be 32 to 512 MiB.
    _linear_peak(64, 512)
    peaks = {
        (t, v): _linear_peak(t, v) / MIB for t, v in ((1024, 8192), (1024, 65536), (8192, 8192))
    }
    print({shape: round(peak, 1) for shape, peak in peaks.items()})
    assert max(peaks.values()) < 44
