"""Let the optimizers' type checks accept CPU tensors.

Failure:  ``TypeError: Wrapped parameters must be one of torch.cuda.FloatTensor, ... Received
    torch.FloatTensor`` from the optimizers' constructors, a bare ``AssertionError`` from
    ``clip_grad_by_total_norm_fp32``, and bfloat16 parameters that get no ``main_param``.
Trigger:  a mixed-precision or distributed optimizer, or gradient clipping, without a GPU.
Safe because: the checks compare ``Tensor.type()`` with names of CUDA types; only the names in the
    four functions' constants change (``torch.cuda.FloatTensor`` to ``torch.FloatTensor``). The
    dtype that each name stands for, and all code, stay as they are.
Upstream: the checks date from before ``Tensor.dtype``.
Delete when: megatron-core compares dtypes.
"""

from types import CodeType, FunctionType, ModuleType

from megatron_patches._guard import checked_function, require_cpu_only_host
from megatron_patches._import_hook import MegatronImportHook

NAME = "tensor_type_names"


def apply(hook: MegatronImportHook) -> None:
    """Register the change of the three optimizer modules that check type names."""
    require_cpu_only_host(NAME)
    hook.after("megatron.core.optimizer.clip_grads", _in_gradient_clipping)
    hook.after("megatron.core.optimizer.optimizer", _in_mixed_precision_optimizer)
    hook.after("megatron.core.optimizer.distrib_optimizer", _in_distributed_optimizer)


def _in_gradient_clipping(module: ModuleType) -> None:
    _use_cpu_names(checked_function(module, "clip_grad_by_total_norm_fp32", sha="8edb9da53650"))


def _in_mixed_precision_optimizer(module: ModuleType) -> None:
    optimizer = module.Float16OptimizerWithFloat16Params
    _use_cpu_names(checked_function(optimizer, "__init__", sha="1d470dedcf8e"))


def _in_distributed_optimizer(module: ModuleType) -> None:
    optimizer = module.DistributedOptimizer
    _use_cpu_names(checked_function(optimizer, "__init__", sha="3275f640fc1b"))
    _use_cpu_names(
        checked_function(optimizer, "_build_model_and_main_param_groups", sha="1b9f0ec06718")
    )


def _use_cpu_names(function: FunctionType) -> None:
    # In place, so that whoever already holds the function gets the change too.
    function.__code__ = _with_cpu_names(function.__code__)


def _with_cpu_names(constant):
    """The same constant with names of CUDA types replaced, inside tuples and nested code too."""
    if isinstance(constant, CodeType):
        return constant.replace(co_consts=_with_cpu_names(constant.co_consts))
    if isinstance(constant, tuple):
        return tuple(_with_cpu_names(item) for item in constant)
    if isinstance(constant, str) and constant.startswith("torch.cuda."):
        return constant.replace("torch.cuda.", "torch.", 1)
    return constant
