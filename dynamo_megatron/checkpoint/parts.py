"""What a checkpoint needs of the policy; ``actor.policy.MegatronPolicy`` has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor
from torch.distributed import ProcessGroup

from dynamo_megatron.hf.architecture import Architecture


class Layout(Protocol):
    """This rank's place (see ``actor.topology.Topology``)."""

    @property
    def rank(self) -> int:
        """Global rank."""
        ...

    @property
    def device(self) -> torch.device:
        """Where parameters live."""
        ...

    @property
    def tensor_size(self) -> int:
        """Tensor-parallel ranks."""
        ...

    @property
    def pipeline_size(self) -> int:
        """Pipeline stages."""
        ...

    @property
    def data_size(self) -> int:
        """Data-parallel ranks."""
        ...

    @property
    def world_group(self) -> ProcessGroup:
        """All ranks."""
        ...


class TrainedPolicy(Protocol):
    """A policy with its optimizer and schedule."""

    @property
    def module(self) -> GPTModel:
        """This rank's part of the model, without wrappers."""
        ...

    @property
    def optimizer(self) -> MegatronOptimizer:
        """Over the module's parameters."""
        ...

    @property
    def scheduler(self) -> OptimizerParamScheduler:
        """Learning-rate schedule."""
        ...

    @property
    def topology(self) -> Layout:
        """This rank's place."""
        ...

    @property
    def arch(self) -> Architecture:
        """Shape of the model."""
        ...

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Collective stream of the weights under Hugging Face names."""
        ...
