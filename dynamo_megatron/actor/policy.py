"""``MegatronPolicy``: statistics, updates and weights of the policy, for any layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import Float16Module
from torch import Tensor, nn

from dynamo_megatron.actor.forward_step import (
    NUM_SUMS,
    LossReport,
    LossSettings,
    statistics_step,
    training_step,
)
from dynamo_megatron.actor.model import HeadSettings, build_model
from dynamo_megatron.actor.optimizer import (
    OptimizerSettings,
    build_optimizer,
    build_scheduler,
    step_if_finite,
)
from dynamo_megatron.actor.topology import Topology
from dynamo_megatron.actor.weights import export_hf_weights, load_hf_weights
from dynamo_megatron.hf.architecture import Architecture
from dynamo_megatron.hf.reader import SafetensorsReader
from dynamo_megatron.kernels.linear import LOGITS_BUDGET_BYTES
from dynamo_megatron.parallel.reduce import all_reduce_max, all_reduce_sum
from dynamo_megatron.types import (
    MiniBatch,
    Modulate,
    OwnedStats,
    TokenInputs,
    TokenStats,
    TrainBatch,
    UpdateStats,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings:
    """Everything about the policy that is not its layout.

    Attributes:
        temperature: the policy is softmax(logits / temperature).
        head: variant of the output layer (see ``actor.model.HeadSettings``).
        logits_budget_bytes: for the variant ``auto``.
        dtype: of parameters and activations; gradients and optimizer are float32.
        sequence_parallel: split activations over the tensor ranks between matrix products.
        recompute: recompute layers in the backward pass.
        vocab_multiple: the vocabulary is padded to a multiple of this on every tensor rank.
        loss: numbers of the policy loss.
        optimizer: numbers of the optimizer.
    """

    temperature: float
    head: Literal["auto", "logits", "fused"] = "auto"
    logits_budget_bytes: int = LOGITS_BUDGET_BYTES
    dtype: torch.dtype
    sequence_parallel: bool
    recompute: bool
    vocab_multiple: int
    loss: LossSettings
    optimizer: OptimizerSettings


class MegatronPolicy:
    """The policy on this rank. Every method is collective: all ranks call it together."""

    def __init__(
        self, model_dir: Path, arch: Architecture, topology: Topology, settings: PolicySettings
    ) -> None:
        """Build this rank's part and load it from a Hugging Face folder.

        Raises:
            TopologyError: the model cannot be cut this way.
            WeightsError: the folder's weights do not fit its config.json.
        """
        self.arch, self.topology, self.settings = arch, topology, settings
        module = build_model(
            arch,
            topology,
            HeadSettings(
                temperature=settings.temperature,
                vocab_size=arch.vocab_size,
                variant=settings.head,
                logits_budget_bytes=settings.logits_budget_bytes,
            ),
            sequence_parallel=settings.sequence_parallel,
            dtype=settings.dtype,
            recompute=settings.recompute,
            vocab_multiple=settings.vocab_multiple,
        )
        with SafetensorsReader(model_dir) as reader:
            load_hf_weights(module, reader, arch, topology)
        self.module = module
        self.config = module.config
        wrapped: nn.Module = module
        if settings.dtype is torch.bfloat16:
            wrapped = Float16Module(self.config, module)
        self.model = DistributedDataParallel(
            self.config,
            DistributedDataParallelConfig(
                use_distributed_optimizer=settings.optimizer.distributed,
                grad_reduce_in_fp32=True,
                # A non-finite gradient is our step's business: skipped and counted, no crash.
                check_for_nan_in_grad=False,
            ),
            wrapped,
        )
        self.optimizer = build_optimizer(self.model, settings.optimizer, settings.dtype)
        self.scheduler = build_scheduler(self.optimizer, settings.optimizer)
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss
        self._reference: list[Tensor] | None = None
        if settings.loss.kl_coefficient > 0:
            self._reference = [p.detach().clone() for p in module.parameters()]

    @property
    def reports_tokens(self) -> bool:
        """Among the ranks that own the same tokens, this one counts them in metrics."""
        return self.topology.last_stage and self.topology.tensor_rank == 0

    @property
    def data_size(self) -> int:
        """Number of data-parallel shares that mini-batches are planned for."""
        return self.topology.data_size

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The current weights under Hugging Face names; every rank must exhaust the stream."""
        return export_hf_weights(
            self.module, self.arch, self.topology, vocab_multiple=self.settings.vocab_multiple
        )

    def start_from_present_weights(self) -> None:
        """Take weights that were loaded after construction as those that the run starts from.

        They are the reference of the KL penalty, and the optimizer copies them where it keeps
        copies. Not for weights that are being trained: the optimizer's copies are more exact.
        """
        self.optimizer.reload_model_params()
        if self._reference is not None:
            self._reference = [p.detach().clone() for p in self.module.parameters()]

    def token_stats(self, batch: TrainBatch, plan: Sequence[MiniBatch]) -> OwnedStats:
        """Statistics of the policy as it is, for the response tokens whose loss this rank owns."""
        num_tokens = batch.num_response_tokens
        columns = {name: torch.zeros(num_tokens) for name in TokenStats.__slots__}
        owned = torch.zeros(num_tokens, dtype=torch.bool)
        with torch.no_grad():
            for mini_batch in plan:
                rows = self._run(mini_batch, statistics_step(self.topology.device), train=False)
                for token_index, stats in rows:
                    owned[token_index] = True
                    for name, column in columns.items():
                        column[token_index] = getattr(stats, name).float().cpu()
        return OwnedStats(stats=TokenStats(**columns), owned=owned)

    def reference_logp(self, batch: TrainBatch, plan: Sequence[MiniBatch]) -> Tensor | None:
        """[T] log-probabilities under the policy the run started from; None without a penalty."""
        if self._reference is None:
            return None
        parameters = list(self.module.parameters())
        current = [p.detach().clone() for p in parameters]
        try:
            _copy_all(parameters, self._reference)
            return self.token_stats(batch, plan).stats.logp
        finally:
            _copy_all(parameters, current)

    def update(
        self,
        plan: Sequence[MiniBatch],
        tokens: TokenInputs,
        modulate: Callable[[MiniBatch], Modulate] | None = None,
    ) -> list[UpdateStats]:
        """One optimizer step for each mini-batch.

        Args:
            plan: the step's mini-batches.
            tokens: advantages and log-probabilities, [T].
            modulate: for each mini-batch the modulation by current statistics; None when the
                advantages are final.
        """
        return [
            self._update(mini_batch, tokens, modulate(mini_batch) if modulate else None)
            for mini_batch in plan
        ]

    def accumulate_gradients(
        self, mini_batch: MiniBatch, tokens: TokenInputs, modulate: Modulate | None = None
    ) -> list[LossReport]:
        """Clear the gradients, then leave those of one mini-batch, divided and reduced."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        step = training_step(tokens, self.settings.loss, self.topology.device, modulate)
        return self._run(mini_batch, step, train=True)

    def _update(
        self, mini_batch: MiniBatch, tokens: TokenInputs, modulate: Modulate | None
    ) -> UpdateStats:
        reports = self.accumulate_gradients(mini_batch, tokens, modulate)
        learning_rate = self.optimizer.param_groups[0]["lr"]
        outcome = step_if_finite(self.optimizer, self.settings.optimizer.clip_grad)
        if outcome.applied:
            self.scheduler.step(1)
        sums, ratio_max = self._reduce(reports)
        loss, entropy, clipped, to_old, reference, count = (sums / max(sums[-1], 1.0)).tolist()
        assert count in (0.0, 1.0), "sums are divided by their own token count"
        return UpdateStats(
            loss=loss,
            entropy=entropy,
            clip_fraction=clipped,
            ratio_max=ratio_max,
            approx_kl=to_old,
            reference_kl=reference,
            grad_norm=outcome.grad_norm,
            learning_rate=learning_rate,
            skipped=not outcome.applied,
            num_tokens=mini_batch.num_tokens,
        )

    def _reduce(self, reports: Sequence[LossReport]) -> tuple[Tensor, float]:
        """Sums and largest ratio over all ranks; tensor ranks hold the same and count once."""
        sums = torch.zeros(NUM_SUMS, dtype=torch.float64)
        ratio_max = torch.zeros(1, dtype=torch.float64)
        if self.reports_tokens:
            for report in reports:
                sums += report.sums.cpu()
                ratio_max = torch.maximum(ratio_max, report.ratio_max.double().cpu())
        group = self.topology.world_group
        return all_reduce_sum(sums, group=group), float(all_reduce_max(ratio_max, group=group))

    def _run(self, mini_batch: MiniBatch, forward_step: Callable, *, train: bool) -> list:
        rows = mini_batch.micro_batches[self.topology.data_rank]
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(rows),
            model=self.model,
            num_microbatches=len(rows),
            # With pipeline stages every row of a mini-batch has this length (batching.split).
            seq_length=rows[0].input_ids.numel(),
            micro_batch_size=1,
            forward_only=not train,
            collect_non_loss_data=not train,
        )


@torch.no_grad()
def _copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)
