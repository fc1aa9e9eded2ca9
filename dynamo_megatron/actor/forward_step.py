"""The forward step, and THE place that states the loss normalisation.

Who divides by what:

* The loss function returns the 3-tuple (sum of the token losses of this micro-batch, its number of
  response tokens, report). With ``calculate_per_token_loss=True`` the pipeline schedule then
  divides by nothing: neither by the tokens of the micro-batch nor by the number of micro-batches
  (megatron-core 0.16.1, ``pipeline_parallel.schedules.forward_step_calc_loss``), and
  DistributedDataParallel sums the gradients over data-parallel ranks without averaging.
* ``finalize_model_grads`` sums the token counts over micro-batches and data-parallel ranks, and
  divides every gradient once, by that sum: the response tokens of the whole mini-batch.

So the gradient is that of  (1 / N_tok) * sum over all response tokens of the mini-batch,  whatever
the number of micro-batches and data-parallel ranks, and padding, prompts and dummy micro-batches
count for nothing. Returning a 2-tuple, or leaving the flag off, would silently change that.

``TokenInputs.loss_weights`` multiply the policy loss of a token, after its advantage is modulated,
and nothing else: not the penalty to the reference policy, and not the count. A token with weight 0
is still one of the N_tok.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn

from dynamo_megatron.algo.policy_loss import clipped_policy_loss, kl_penalty
from dynamo_megatron.types import MicroBatch, Modulate, TokenInputs, TokenStats

NUM_SUMS = 6
"""Entries of ``LossReport.sums``: loss, entropy, clipped, k3 to old, reference KL, tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """The numbers of the policy loss (see ``algo.policy_loss``)."""

    clip_low: float
    clip_high: float
    dual_clip: float | None
    kl_coefficient: float = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"


@dataclass(frozen=True, slots=True)
class LossReport:
    """Sums over a micro-batch's response tokens ([NUM_SUMS] float64) and its largest ratio."""

    sums: Tensor
    ratio_max: Tensor


def packed_parameters(row: MicroBatch, device: torch.device) -> PackedSeqParams:
    """What the attention needs to keep the sequences of a row apart."""
    starts = row.cu_seqlens.to(device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=row.max_seqlen,
        max_seqlen_kv=row.max_seqlen,
    )


def forward_row(model: nn.Module, row: MicroBatch, device: torch.device) -> Tensor | TokenStats:
    """Run one packed row through this stage."""
    return model(
        input_ids=row.input_ids[None].to(device),
        position_ids=row.position_ids[None].to(device),
        attention_mask=None,
        labels=row.targets.to(device),
        loss_mask=row.rows.to(device),
        packed_seq_params=packed_parameters(row, device),
    )


def statistics_step(device: torch.device) -> Callable:
    """A Megatron forward step that only collects the token statistics of each row."""

    def forward_step(rows: Iterator[MicroBatch], model: nn.Module):
        row = next(rows)

        def collect(stats: TokenStats, non_loss_data: bool = True):
            return row.token_index, stats.detached()

        return forward_row(model, row, device), collect

    return forward_step


def training_step(
    tokens: TokenInputs,
    settings: LossSettings,
    device: torch.device,
    modulate: Modulate | None = None,
) -> Callable:
    """A Megatron forward step with the policy loss."""

    def forward_step(rows: Iterator[MicroBatch], model: nn.Module):
        row = next(rows)

        def loss(stats: TokenStats):
            total, report = policy_loss_sum(stats, tokens, row.token_index, settings, modulate)
            count = torch.tensor(row.token_index.numel(), dtype=torch.int, device=device)
            return total, count, report

        return forward_row(model, row, device), loss

    return forward_step


def policy_loss_sum(
    stats: TokenStats,
    tokens: TokenInputs,
    token_index: Tensor,
    settings: LossSettings,
    modulate: Modulate | None,
) -> tuple[Tensor, LossReport]:
    """Sum of a micro-batch's token losses (a graph even when there is no token) and a report."""
    device = stats.logp.device
    advantages = tokens.advantages[token_index].to(device)
    old_logp = tokens.old_logp[token_index].to(device)
    if modulate is not None:
        ratio = torch.exp((stats.logp.detach() - old_logp).clamp(-20.0, 20.0))
        advantages = modulate(advantages, stats.detached(), ratio)
    terms = clipped_policy_loss(
        stats.logp,
        old_logp,
        advantages,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
    )
    loss = terms.loss_T
    if tokens.loss_weights is not None:
        loss = loss * tokens.loss_weights[token_index].to(device)
    penalty = torch.zeros_like(old_logp)
    if tokens.reference_logp is not None:
        reference = tokens.reference_logp[token_index].to(device)
        penalty = kl_penalty(stats.logp, reference, settings.kl_estimator)
        loss = loss + settings.kl_coefficient * penalty
    with torch.no_grad():
        to_old = kl_penalty(old_logp, stats.logp, "k3")
        columns = (loss, stats.entropy, terms.clipped_T, to_old, penalty, torch.ones_like(old_logp))
        sums = torch.stack([c.detach().double().sum() for c in columns])
        ratio_max = torch.cat([terms.ratio_T, terms.ratio_T.new_zeros(1)]).max()
    return loss.sum(), LossReport(sums, ratio_max)
