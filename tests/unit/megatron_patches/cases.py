"""What each patch makes possible, as functions to run with it and without it.

Each returns a value that JSON can carry. megatron-core is imported inside: whoever calls decides
what is patched before.
"""

import logging
import warnings
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn import functional as F

import megatron_patches
from tests.unit.megatron_patches.fresh import outcome_of

VOCABULARY, LENGTH = 64, 16


def without(patches: list[str], names: list[str]) -> dict[str, dict]:
    """Run cases, one after the other, in a process that has all patches but ``patches``."""
    megatron_patches._apply(skip=patches)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return {name: outcome_of(globals()[name]) for name in names}


def import_without_a_warning():
    """The modules that training needs, imported with every warning an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        import megatron.core.distributed
        import megatron.core.models.gpt.gpt_layer_specs
        import megatron.core.optimizer
        import megatron.core.pipeline_parallel  # noqa: F401

    return "imported"


def train():
    """Losses of two steps on one batch: the second is smaller."""
    trainer = build_trainer()
    first, second = trainer.step(), trainer.step()
    return {"starts_at_chance": abs(first - 4.16) < 0.3, "learns": second < first}  # ln 64 = 4.16


def draw_inside_and_outside():
    """Numbers inside and outside a tracker's region, and gradients through recomputed dropout."""
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    initialize()
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger("megatron.core.tensor_parallel.random").addHandler(handler)
    model_parallel_cuda_manual_seed(7)
    tracker = tensor_parallel.get_cuda_rng_tracker()
    drawn = {"outside": [], "inside": []}
    for _ in range(2):
        drawn["outside"].append(torch.rand(()).item())
        with tracker.fork():
            drawn["inside"].append(torch.rand(()).item())
    x = torch.ones(1000, requires_grad=True)
    y = tensor_parallel.checkpoint(F.dropout, False, x)
    y.sum().backward()
    return {
        **drawn,
        "recomputed_mask_is_the_same": torch.equal(y, x.grad),
        "warnings": len(records),
    }


def clip_a_gradient():
    """A gradient of norm 2 clipped to norm 1."""
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = torch.tensor([1.0, 1.0, -1.0, 1.0])
    clip_grad_by_total_norm_fp32([parameter], max_norm=1.0, total_norm=2.0)
    return [round(x, 4) for x in parameter.grad.tolist()]


def mixed_precision_optimizer():
    """The types of the parameters and of their copies in the optimizer."""
    trainer = build_trainer(bf16=True)
    names = {p.dtype: p.main_param.dtype for p in trainer.model.parameters()}
    return {str(model): str(main) for model, main in names.items()}


def distributed_optimizer_in_bfloat16():
    """Whether every parameter knows of its sharded float32 copy."""
    trainer = build_trainer(bf16=True, distributed=True)
    return all(p.main_param_sharded for p in trainer.model.parameters())


def restore_a_gradient_scaler():
    """The scale after a checkpoint's scale was loaded."""
    from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler

    saved = ConstantGradScaler(8.0)._scale
    scaler = DynamicGradScaler(4.0, 1.0, 2.0, 0.5, growth_interval=10, hysteresis=1)
    scaler.load_state_dict({"scale": saved, "growth_tracker": 0, "hysteresis_tracker": 1})
    return scaler.scale.item()


def norm_under_sequence_parallelism():
    """The mark that gradient finalization looks for, and the norm of [3, 4]."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    norms, configs = {}, {}
    for parallel in (True, False):
        configs[parallel] = build_config(sequence_parallel=parallel, tensor_model_parallel_size=2)
        norms[parallel] = WrappedTorchNorm(configs[parallel], 2, eps=0.0)
    return {
        "marks": [norms[p].weight.sequence_parallel for p in (True, False)],
        "config_is_kept": configs[True].sequence_parallel,
        # root of the mean square of 3 and 4 is 5 / sqrt(2)
        "values": [round(x, 4) for x in norms[True](torch.tensor([3.0, 4.0])).tolist()],
    }


def state_of_a_fresh_distributed_optimizer():
    """The step of an optimizer that has not made one."""
    optimizer = distributed_optimizer(build_trainer(distributed=True))
    return optimizer.state_dict()["optimizer"]["param_groups"][0]["step"]


def steps_after_a_load():
    """How many of a resumed optimizer's parameters share a step counter with another one."""
    trained, fresh = build_trainer(distributed=True), build_trainer(distributed=True)
    trained.step()
    resumed = distributed_optimizer(fresh)
    resumed.load_state_dict(distributed_optimizer(trained).state_dict())
    steps = [state["step"] for state in resumed.optimizer.state.values()]
    return {
        "shared": len(steps) - len({step.data_ptr() for step in steps}),
        "values": sorted({step.item() for step in steps}),
    }


def resumed_equals_uninterrupted():
    """Whether one step, save, load, one step ends where two steps end, bit for bit."""
    trained, fresh = build_trainer(distributed=True), build_trainer(distributed=True)
    trained.step()
    source, target = distributed_optimizer(trained), distributed_optimizer(fresh)
    target.load_state_dict(source.state_dict())
    # Goes through the function that also loads the checkpoint format "fully_reshardable".
    with torch.no_grad():
        target.load_parameter_state_from_dp_zero(source.get_parameter_state_dp_zero())
    fresh.model.load_state_dict(trained.model.state_dict())
    trained.step()
    fresh.step()
    pairs = zip(trained.model.parameters(), fresh.model.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def compiled_fusion():
    """Whether megatron-core's bias-dropout-add is a compiled function."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.fusions.fused_bias_dropout import bias_dropout_add_fused_train

    return hasattr(bias_dropout_add_fused_train, "_torchdynamo_orig_callable")


def graphs_compiled_for_our_own_function():
    """How many graphs torch.compile makes of a function that is not megatron-core's."""
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    torch.compile(lambda x: x + 1, backend=backend)(torch.zeros(1))
    return len(graphs)


def initialize():
    from megatron.core import parallel_state

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()


def build_config(**changes):
    from megatron.core.transformer.transformer_config import TransformerConfig

    fields = {
        "num_layers": 1,
        "hidden_size": 32,
        "num_attention_heads": 2,
        "normalization": "RMSNorm",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "use_cpu_initialization": True,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "cuda_graph_scope": [],  # Megatron warns about its own default
    }
    return TransformerConfig(**{**fields, **changes})


def build_trainer(*, bf16: bool = False, distributed: bool = False) -> SimpleNamespace:
    """A tiny GPT, its optimizer, and ``step()``, which returns the loss before the update."""
    warnings.simplefilter("ignore")  # Megatron's deprecations while training are not the subject
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    initialize()
    model_parallel_cuda_manual_seed(1, force_reset_rng=True)
    dtype = torch.bfloat16 if bf16 else torch.float32
    config = build_config(bf16=bf16, params_dtype=dtype, pipeline_dtype=dtype)
    gpt = GPTModel(
        config, get_gpt_layer_local_spec(normalization="RMSNorm"), VOCABULARY, LENGTH
    ).to(dtype)
    model = DistributedDataParallel(
        config, DistributedDataParallelConfig(use_distributed_optimizer=distributed), gpt
    )
    settings = OptimizerConfig(
        lr=1e-2, bf16=bf16, params_dtype=dtype, use_distributed_optimizer=distributed
    )
    optimizer = get_megatron_optimizer(settings, [model])
    config.finalize_model_grads_func = finalize_model_grads
    tokens = torch.randint(0, VOCABULARY, (2, LENGTH + 1), generator=torch.manual_seed(0))

    def forward(batches, model):
        inputs, labels = next(batches)
        positions = torch.arange(LENGTH).expand_as(inputs)
        return model(inputs, positions, None, labels=labels), mean_loss

    def step() -> float:
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reduced = get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=iter([(tokens[:, :-1], tokens[:, 1:].contiguous())]),
            model=model,
            num_microbatches=1,
            seq_length=LENGTH,
            micro_batch_size=2,
            forward_only=False,
        )
        optimizer.step()
        return reduced[0]["loss"]

    return SimpleNamespace(model=model, optimizer=optimizer, step=step)


def distributed_optimizer(trainer: SimpleNamespace):
    """The one optimizer in Megatron's chain of optimizers."""
    (optimizer,) = trainer.optimizer.chained_optimizers
    return optimizer


def mean_loss(per_token):
    loss = per_token.float().mean()
    return loss, {"loss": loss.item()}
