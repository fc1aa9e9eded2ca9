"""The usual vocabulary-parallel cross-entropy and entropy, restated plainly, to compare with.

Two autograd functions, three collectives each: maximum, sum of exponentials and target logit for
the cross-entropy; maximum, sum and mean logit for the entropy. Both keep the probabilities for the
backward. This is how vocabulary-parallel RL losses are commonly built; it is written here from
that description and is not any project's code.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor


def _all_reduce(value: Tensor, op: dist.ReduceOp, group: dist.ProcessGroup | None) -> None:
    if group is not None:
        dist.all_reduce(value, op=op, group=group)


def _exp_(value: Tensor, base2: bool) -> Tensor:
    """e^value in place; ``base2`` by the much faster power of two of a CPU."""
    return value.mul_(1.0 / math.log(2.0)).exp2_() if base2 else value.exp_()


class _CrossEntropy(torch.autograd.Function):
    """-log pi(y); keeps pi."""

    @staticmethod
    def forward(ctx, logits_TVp, targets_T, group, base2):
        logits = logits_TVp.float()
        top = logits.amax(dim=-1)
        _all_reduce(top, dist.ReduceOp.MAX, group)
        logits = logits - top[:, None]
        start = 0 if group is None else group.rank() * logits.shape[1]
        elsewhere = (targets_T < start) | (targets_T >= start + logits.shape[1])
        columns = (targets_T - start).masked_fill(elsewhere, 0)
        picked = logits.gather(1, columns[:, None])[:, 0].masked_fill(elsewhere, 0.0)
        _all_reduce(picked, dist.ReduceOp.SUM, group)
        pi = _exp_(logits, base2)
        total = pi.sum(dim=-1)
        _all_reduce(total, dist.ReduceOp.SUM, group)
        pi.div_(total[:, None])
        ctx.save_for_backward(pi, elsewhere, columns)
        return total.log() - picked

    @staticmethod
    def backward(ctx, grad_T):
        pi, elsewhere, columns = ctx.saved_tensors
        rows = torch.arange(pi.shape[0], device=pi.device)
        pi[rows, columns] -= (~elsewhere).float()
        return pi.mul_(grad_T[:, None]), None, None, None


class _Entropy(torch.autograd.Function):
    """H; keeps pi and the logits."""

    @staticmethod
    def forward(ctx, logits_TVp, group, base2):
        top = logits_TVp.amax(dim=-1, keepdim=True)
        _all_reduce(top, dist.ReduceOp.MAX, group)
        pi = _exp_(logits_TVp - top, base2)
        total = pi.sum(dim=-1, keepdim=True)
        _all_reduce(total, dist.ReduceOp.SUM, group)
        pi.div_(total)
        mean = (pi * logits_TVp).sum(dim=-1, keepdim=True)
        _all_reduce(mean, dist.ReduceOp.SUM, group)
        ctx.save_for_backward(logits_TVp, pi, mean)
        return (top + total.log() - mean)[:, 0]

    @staticmethod
    def backward(ctx, grad_T):
        logits, pi, mean = ctx.saved_tensors
        return (logits - mean).mul_(pi).mul_(-grad_T[:, None]), None, None


def usual_stats(
    logits_TVp: Tensor,
    targets_T: Tensor,
    *,
    temperature: float,
    group: dist.ProcessGroup | None = None,
    upcast: bool = True,
    base2: bool = False,
) -> tuple[Tensor, Tensor]:
    """(log pi(y), H), with the logits raised to float32 first, or kept as they are."""
    logits = logits_TVp.float() if upcast else logits_TVp
    logits = logits / temperature
    entropy_T = _Entropy.apply(logits, group, base2)
    return -_CrossEntropy.apply(logits, targets_T, group, base2), entropy_T


def usual_stats_with_q(
    logits_TVp: Tensor,
    targets_T: Tensor,
    *,
    temperature: float,
    group: dist.ProcessGroup | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(log pi(y), H, Q): Q bolted on by writing out the log-probabilities once more."""
    logp_T, entropy_T = usual_stats(logits_TVp, targets_T, temperature=temperature, group=group)
    with torch.no_grad():
        logits = logits_TVp.float() / temperature
        top = logits.amax(dim=-1, keepdim=True)
        _all_reduce(top, dist.ReduceOp.MAX, group)
        total = (logits - top).exp().sum(dim=-1, keepdim=True)
        _all_reduce(total, dist.ReduceOp.SUM, group)
        log_pi = logits - top - total.log()
        q_T = (log_pi.exp().square() * (log_pi + entropy_T.detach()[:, None])).sum(dim=-1)
        _all_reduce(q_T, dist.ReduceOp.SUM, group)
    return logp_T, entropy_T, q_T
