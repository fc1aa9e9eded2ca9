"""Allow torch's norms under sequence parallelism.

Failure:  ``AssertionError: sequence parallel not supported by torch LayerNorm``.
Trigger:  ``sequence_parallel=True`` with the local layer spec, whose norms are torch's when Apex
    is not installed.
Safe because: a norm acts on each token alone, so it computes the same on a slice of the sequence.
    Upstream refuses because the weight lacks the attribute ``sequence_parallel``, by which
    ``finalize_model_grads`` finds the gradients to sum over the tensor-parallel group. The
    attribute is set here, as Megatron's own fused norm does.
Upstream: no public thread found.
Delete when: ``WrappedTorchNorm`` marks its parameters itself.
"""

import copy
import functools
from types import ModuleType

from torch import nn

from megatron_patches._guard import checked_function, require_cpu_only_host
from megatron_patches._import_hook import MegatronImportHook

NAME = "sequence_parallel_norm"


def apply(hook: MegatronImportHook) -> None:
    """Register the change of ``WrappedTorchNorm``."""
    require_cpu_only_host(NAME)
    hook.after("megatron.core.transformer.torch_norm", _allow_sequence_parallel)


def _allow_sequence_parallel(module: ModuleType) -> None:
    upstream = checked_function(module.WrappedTorchNorm, "__new__", sha="6cb54a06fa41")

    @functools.wraps(upstream)
    def build(cls: type, config, *args: object, **kwargs: object) -> nn.Module:
        # A shallow copy, so that the other fields are still checked, and by upstream.
        without = copy.copy(config)
        without.sequence_parallel = False
        norm = upstream(cls, without, *args, **kwargs)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm

    module.WrappedTorchNorm.__new__ = staticmethod(build)
