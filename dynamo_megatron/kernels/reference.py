"""The dense definition: every probability written out, gradients by autograd.

Any float dtype; float64 in, float64 out. It holds several tensors of the size of the logits and
gathers the vocabulary over the group: for tests and for reading.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from dynamo_megatron.kernels.shard import VocabShard
from dynamo_megatron.types import TokenStats


def reference_token_stats(
    logits_TVp: Tensor,
    targets_T: Tensor,
    inv_T: Tensor,
    shard: VocabShard,
    *,
    entropy_grad: bool = True,
) -> TokenStats:
    """`token_stats`, written as its definition.

    Args:
        logits_TVp: [T, Vp] this rank's logits; computed in float32, or float64 if given so.
        targets_T: [T] int64 global ids, negative ones ignored.
        inv_T: [T] float64, 1 / temperature.
        shard: This rank's shard; shards are equal and in rank order.
        entropy_grad: Let the entropy carry a gradient.

    Collectives on the shard's group: one all-gather of [T, Vp].
    """
    logits_TVp = logits_TVp.to(torch.promote_types(logits_TVp.dtype, torch.float32))
    z_TV = _whole_vocabulary(logits_TVp, shard) * inv_T[:, None].to(logits_TVp.dtype)
    log_pi_TV = z_TV.log_softmax(dim=-1)
    pi_TV = log_pi_TV.exp()
    # pi log pi is 0 at pi = 0. A token without any finite logit is NaN everywhere, and stays it.
    finite_log_pi_TV = log_pi_TV.masked_fill(log_pi_TV == -torch.inf, 0.0)
    entropy_T = -(pi_TV * finite_log_pi_TV).sum(dim=-1)
    logp_T = log_pi_TV.gather(1, targets_T.clamp(min=0)[:, None])[:, 0]
    pi2_TV = pi_TV.detach().square()
    q_T = (pi2_TV * (finite_log_pi_TV + entropy_T[:, None]).detach()).sum(dim=-1)
    ignored_T = targets_T < 0
    constant_T = entropy_T.detach()
    return TokenStats(
        logp=torch.where(ignored_T, 0.0, logp_T),
        entropy=torch.where(ignored_T, constant_T, entropy_T) if entropy_grad else constant_T,
        lam=torch.where(ignored_T, 0.0, (logp_T + entropy_T).detach()),
        sum_pi2=pi2_TV.sum(dim=-1),
        q=q_T,
    )


def _whole_vocabulary(logits_TVp: Tensor, shard: VocabShard) -> Tensor:
    """[T, V] real columns of all ranks; the gradient reaches this rank's own."""
    if shard.group is None or shard.ranks == 1:
        return logits_TVp[:, : shard.vocab_size]
    parts = [torch.empty_like(logits_TVp) for _ in range(shard.ranks)]
    dist.all_gather(parts, logits_TVp.detach().contiguous(), group=shard.group)
    # Every rank computes the same loss from the same values, so its own columns' share of the
    # gradient is the whole gradient: no reduction in the backward.
    parts[shard.group.rank()] = logits_TVp
    return torch.cat(parts, dim=-1)[:, : shard.vocab_size]
