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

    Args:
        model: vLLM's model, before the update.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self._parameters = [name for name, _ in model.named_parameters()]
        self._received: Counter[str] = Counter()
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
            yield name, tensor

    def audit(self) -> UpdateAudit:
        """Compare what came with what the model consists of."""
        return audit(
            self._parameters,
            self._received,
            self._written,
            packed=packed_parts(self._model),
            tied=is_tied(self._model),
        )


def audit(
    parameters: Sequence[str],
    received: Mapping[str, int],
    written: set[str],
    *,
    packed: Mapping[str, Sequence[str]],
    tied: bool,
) -> UpdateAudit:
    """Whether every parameter was written exactly once, from all of its parts.

    Args:
        parameters: names of the engine's parameters.
        received: how often each Hugging Face tensor came.
        written: engine parameters that the loader says it wrote.
        packed: for a fused module the modules it is made of, such as qkv_proj: q_proj, k_proj,
            v_proj.
        tied: the output layer is the embedding; its tensor may come as well and is ignored.
    """
    needed = {part for name in parameters for part in parts_of(name, packed)}
    ignored = {OUTPUT_LAYER} if tied else set()
    faults = {
        "never came": sorted(needed - received.keys() - ignored),
        "came more than once": sorted(name for name, count in received.items() if count > 1),
        "are unknown to the engine": sorted(received.keys() - needed - ignored),
        "were not written": sorted(set(parameters) - written - ignored),
    }
    problems = tuple(
        f"{len(names)} {kind}: {_listed(names)}" for kind, names in faults.items() if names
    )
    return UpdateAudit(tensors=len(received), parameters=len(parameters), problems=problems)


def parts_of(name: str, packed: Mapping[str, Sequence[str]]) -> list[str]:
    """Hugging Face names of the tensors that an engine parameter is made of."""
    path, _, kind = name.rpartition(".")
    prefix, _, module = path.rpartition(".")
    parts = packed.get(module, [module])
    return [".".join(filter(None, (prefix, part, kind))) for part in parts]


def packed_parts(model: nn.Module) -> Mapping[str, Sequence[str]]:
    """The model class's table of fused modules."""
    return getattr(type(model), "packed_modules_mapping", {})


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

    def dynamo_parameters(self) -> int:
        """Number of parameters."""
        return sum(1 for _ in self.model_runner.get_model().named_parameters())

    def dynamo_begin_update(self) -> None:
        """Bring the layers into the checkpoint's layout and start counting."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        model = self.model_runner.get_model()
        self.dynamo_counter = WeightCounter(model)
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            initialize_layerwise_reload(model)
        self.dynamo_counter.install()

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
