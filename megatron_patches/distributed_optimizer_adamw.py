"""Save and resume the distributed optimizer over torch's AdamW.

Failure:  three faults around AdamW's per-parameter ``step``:
    1. ``state_dict()`` of an optimizer that has not stepped: a bare ``AssertionError``
       (``len(steps) == 1``), which stops every load into a fresh process.
    2. ``load_state_dict()`` gives all parameters the SAME ``step`` tensor. AdamW then adds one to
       it once per parameter: wrong bias correction after a resume, without an error.
    3. loading a ``fully_reshardable`` checkpoint: ``KeyError: 'step'``.
Trigger:  ``use_distributed_optimizer`` where neither Transformer Engine nor Apex is installed.
Safe because: (1) a fresh state is what AdamW itself makes at its first step, zeros; (2) the value
    of each ``step`` is kept; (3) upstream restores ``step`` in ``load_state_dict``, it is only
    kept out of the copy loop. Nothing changes when Transformer Engine or Apex is there.
Upstream: no public thread found.
Delete when: a resumed run equals an uninterrupted one with megatron-core's own code.
"""

import functools
from types import ModuleType
from typing import Any

import torch

from megatron_patches._guard import checked_function, require_cpu_only_host
from megatron_patches._import_hook import MegatronImportHook

NAME = "distributed_optimizer_adamw"


def apply(hook: MegatronImportHook) -> None:
    """Register the three changes of ``DistributedOptimizer``."""
    require_cpu_only_host(NAME)
    hook.after("megatron.core.optimizer.distrib_optimizer", _fix_steps)


def _fix_steps(module: ModuleType) -> None:
    if module.HAVE_APEX_OR_TE:
        return
    optimizer = module.DistributedOptimizer
    optimizer.state_dict = _with_fresh_state(
        checked_function(optimizer, "state_dict", sha="fe621ae6a622")
    )
    optimizer.load_state_dict = _with_own_steps(
        checked_function(optimizer, "load_state_dict", sha="15f257b4c4f9")
    )
    optimizer._set_main_param_and_optimizer_states = _without_step(
        checked_function(optimizer, "_set_main_param_and_optimizer_states", sha="93c254228283")
    )


def _with_fresh_state(upstream):
    @functools.wraps(upstream)
    def state_dict(self) -> dict[str, Any]:
        if not self.is_stub_optimizer and not self.optimizer.state:
            for group in self.optimizer.param_groups:
                for parameter in group["params"]:
                    self.optimizer.state[parameter] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(parameter),
                        "exp_avg_sq": torch.zeros_like(parameter),
                    }
        return upstream(self)

    return state_dict


def _with_own_steps(upstream):
    @functools.wraps(upstream)
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        upstream(self, state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    return load_state_dict


def _without_step(upstream):
    @functools.wraps(upstream)
    def set_states(self, model_param: torch.Tensor, tensors: dict[str, torch.Tensor]) -> None:
        group, order = self.model_param_group_index_map[model_param]
        state = self.optimizer.state[self.optimizer.param_groups[group]["params"][order]]
        kept = {} if "step" in tensors or "step" not in state else {"step": state.pop("step")}
        try:
            upstream(self, model_param, tensors)
        finally:
            state.update(kept)

    return set_states
