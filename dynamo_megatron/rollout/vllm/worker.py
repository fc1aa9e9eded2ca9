"""What runs inside vLLM's worker processes: weight updates, counted tensor by tensor.

An update is begin, any number of buckets, end. vLLM restores its layers to the layout of the
checkpoint, loads, and packs them again once a layer is complete. It has no complaint about a layer
that stays half loaded, so every tensor is counted here (faults of this kind: ROLL#499, verl#7987).

Loaded by its name through ``worker_extension_cls``, in every worker of a replica; the class becomes
a base of vLLM's worker, whose ``model_runner`` and ``weight_transfer_engine`` it uses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load
from torch import Tensor, nn

from dynamo_megatron.rollout.vllm import gloo_backend
from dynamo_megatron.rollout.vllm.wire import UpdateAudit

SHOWN = 5
EXTENSION = f"{__name__}.WorkerExtension"
OUTPUT_LAYER = "lm_head.weight"

gloo_backend.register()


class WeightCounter:
    """Counts what a model's ``load_weights`` is given and says it wrote, over several calls.

    What cannot be loaded is kept from the model: vLLM counts elements, not names, so that a tensor
    that comes twice would pass for another one, and one that does not fit breaks a layer midway.

    Args:
        model: vLLM's model, before the update.
        shapes: of a checkpoint's tensors, as far as they are to be checked.
    """

    def __init__(
        self, model: Any, shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({})
    ) -> None:
        self._model = model
        self._shapes = shapes
        self._parameters = [name for name, _ in model.named_parameters()]
        self._known = needed_tensors(self._parameters, packed_parts(model))
        if is_tied(model):
            self._known.add(OUTPUT_LAYER)
        self._received: Counter[str] = Counter()
        self._misshapen: list[str] = []
        self._written: set[str] = set()

    def install(self) -> None:
        """Count from now on."""
        original = self._model.load_weights

        def load_weights(weights: Iterable[tuple[str, Tensor]]) -> set[str]:
            written = original(self._counted(weights))
            self._written |= written
            return written

        self._model.load_weights = load_weights

    def remove(self) -> None:
        """The model's own method again."""
        del self._model.load_weights

    def _counted(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            self._received[name] += 1
            wanted = self._shapes.get(name, tuple(tensor.shape))
            if tuple(tensor.shape) != wanted:
                self._misshapen.append(f"{name} {tuple(tensor.shape)} for {wanted}")
            elif name in self._known and self._received[name] == 1:
                yield name, tensor

    def audit(self) -> UpdateAudit:
        """Compare what came with what the model consists of."""
        return audit(
            self._parameters,
            self._received,
            self._written,
            packed=packed_parts(self._model),
            tied=is_tied(self._model),
            misshapen=self._misshapen,
        )


def audit(
    parameters: Sequence[str],
    received: Mapping[str, int],
    written: set[str],
    *,
    packed: Mapping[str, Sequence[str]],
    tied: bool,
    misshapen: Sequence[str] = (),
) -> UpdateAudit:
    """Whether every parameter was written exactly once, from all of its parts.

    Args:
        parameters: names of the engine's parameters.
        received: how often each Hugging Face tensor came.
        written: engine parameters that the loader says it wrote.
        packed: for a fused module the modules it is made of, such as qkv_proj: q_proj, k_proj,
            v_proj.
        tied: the output layer is the embedding; its tensor may come as well and is ignored.
        misshapen: tensors of another shape than the engine's, with both shapes.
    """
    needed = needed_tensors(parameters, packed)
    ignored = {OUTPUT_LAYER} if tied else set()
    faults = {
        "never came": sorted(needed - received.keys() - ignored),
        "came more than once": sorted(name for name, count in received.items() if count > 1),
        "are unknown to the engine": sorted(received.keys() - needed - ignored),
        "are of another shape": sorted(misshapen),
        "were not written": sorted(set(parameters) - written - ignored),
    }
    problems = tuple(
        f"{len(names)} {kind}: {_listed(names)}" for kind, names in faults.items() if names
    )
    return UpdateAudit(tensors=len(received), parameters=len(parameters), problems=problems)


def needed_tensors(parameters: Sequence[str], packed: Mapping[str, Sequence[str]]) -> set[str]:
    """Hugging Face names of all tensors that the engine's parameters are made of."""
    return {part for name in parameters for part in parts_of(name, packed)}


def parts_of(name: str, packed: Mapping[str, Sequence[str]]) -> list[str]:
    """Hugging Face names of the tensors that an engine parameter is made of."""
    path, _, kind = name.rpartition(".")
    prefix, _, module = path.rpartition(".")
    parts = packed.get(module, [module])
    return [".".join(filter(None, (prefix, part, kind))) for part in parts]


def packed_parts(model: nn.Module) -> Mapping[str, Sequence[str]]:
    """The model class's table of fused modules."""
    return getattr(type(model), "packed_modules_mapping", {})


def checkpoint_shapes(config: Any) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint's tensors, from the model's Hugging Face configuration."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    named = model.named_parameters(remove_duplicate=False)
    return {name: tuple(parameter.shape) for name, parameter in named}


def is_tied(model: nn.Module) -> bool:
    """Whether the output layer is the embedding."""
    config: Any = model.config
    return bool(config.tie_word_embeddings)


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


class WorkerExtension:
    """Methods that a replica calls in all of its workers by ``collective_rpc``."""

    model_runner: Any
    model_config: Any
    vllm_config: Any
    weight_transfer_engine: Any
    update_weights: Any
    dynamo_counter: WeightCounter
    dynamo_shapes: dict[str, tuple[int, ...]] | None = None
    dynamo_updating: bool = False

    def dynamo_parameters(self) -> int:
        """Number of parameters."""
        return sum(1 for _ in self.model_runner.get_model().named_parameters())

    def dynamo_begin_update(self) -> None:
        """Bring the layers into the checkpoint's layout and start counting.

        An update that broke midway is ended first: vLLM would add its tensors to the new ones.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if self.dynamo_updating:
            self.dynamo_end_update()
        model = self.model_runner.get_model()
        if self.dynamo_shapes is None:
            self.dynamo_shapes = checkpoint_shapes(self.model_config.hf_config)
        self.dynamo_counter = WeightCounter(model, self.dynamo_shapes)
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            initialize_layerwise_reload(model)
        self.dynamo_counter.install()
        self.dynamo_updating = True

    def dynamo_load_bucket(self, payload: bytes) -> None:
        """Load tensors that came as safetensors bytes."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            self.model_runner.get_model().load_weights(load(payload).items())

    def dynamo_receive_bucket(self, update_info: dict[str, Any]) -> None:
        """Receive tensors through vLLM's weight-transfer engine."""
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            self.weight_transfer_engine.update_weights(update_info)

    def dynamo_end_update(self) -> UpdateAudit:
        """Pack the layers again; says whether every parameter was written exactly once."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        model = self.model_runner.get_model()
        counter = self.dynamo_counter
        counter.remove()
        self.dynamo_updating = False
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            finalize_layerwise_reload(model, self.model_config)
            _repack_tied_output(model)
        self.model_runner.reset_lora_state()
        return counter.audit()


def _repack_tied_output(model: Any) -> None:
    """Make a tied output layer's packed copy anew.

    On a CPU vLLM 0.32 keeps a packed copy of the output layer beside the embedding that it is tied
    to, and a reload renews only the embedding: the model then reads with new and writes with old
    weights, without an error.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.platforms import current_platform

    if current_platform.is_cpu() and is_tied(model):
        dispatch_cpu_unquantized_gemm(model.lm_head, remove_weight=False)
