"""The schema of a run: one YAML, one run. Every number a paper gives is cited beside it.

Unknown keys, ill-typed values and combinations that cannot work are refused here, before any
process group or model exists. Reading files and overrides is ``load_config``'s work.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from dynamo_megatron.config_algorithm import (
    AdvantageConfig,
    AlgorithmConfig,
    AllocationConfig,
    ClipConfig,
    CorrectionConfig,
    KlConfig,
    ModulationConfig,
)
from dynamo_megatron.config_base import Fraction, NonNegative, Positive, Section
from dynamo_megatron.config_vllm import VllmConfig
from dynamo_megatron.rollout.vllm.limits import check_temperature


class RunConfig(Section):
    """Where the run lives, how long it is and how it starts."""

    dir: str
    """Everything the run leaves is under this folder."""
    num_steps: Positive
    """Steps of the loop: one draw of prompts each."""
    seed: NonNegative = 0
    """Fixes the order of the prompts and every sample."""
    resume: Literal["never", "always", "if_present"] = "never"
    """``never`` refuses a folder that already holds a checkpoint."""
    heartbeat_timeout_s: Annotated[float, Field(ge=5.0)] = 15.0
    """A rank not heard of for this long ends the run with its name, within a minute."""


class ModelConfig(Section):
    """The policy to start from."""

    path: str
    """A Hugging Face model folder, or ``builtin:tiny`` for the one that ships."""
    weights: str | None = None
    """A Megatron checkpoint of this model, converted or a run's: its weights start the run."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and activations; gradients and optimizer state are float32."""
    recompute: bool = False
    """Recompute every layer in the backward pass instead of keeping activations."""
    head: Literal["auto", "logits", "fused"] = "auto"
    """``fused`` never holds a micro-batch's logits; ``auto`` takes it above the budget."""
    logits_budget_mib: Positive = 2048
    """MiB of logits of one micro-batch on one rank, for ``auto``."""


class ParallelConfig(Section):
    """How the policy is split. Data parallelism takes what is left of the world size."""

    tensor: Positive = 1
    """Ranks that share each layer's matrices and the vocabulary."""
    pipeline: Positive = 1
    """Stages that the layers are cut into."""
    sequence: bool = False
    """Sequence parallelism; needs ``tensor`` > 1."""
    context: Positive = 1
    """Ranks that share a row's tokens; only 1 is offered."""
    virtual_pipeline: Positive = 1
    """Model chunks a pipeline rank holds (interleaved schedule) when above 1."""
    vocab_multiple: Positive = 128
    """The vocabulary is padded to a multiple of this on every tensor rank."""

    @model_validator(mode="after")
    def _combination(self) -> ParallelConfig:
        if self.sequence and self.tensor == 1:
            raise ValueError(
                "parallel.sequence=true with parallel.tensor=1: sequence parallelism splits the "
                "activations over the tensor ranks, and there is one. Set parallel.sequence=false "
                "or parallel.tensor to 2 or more."
            )
        if self.virtual_pipeline > 1:
            raise ValueError(
                f"parallel.virtual_pipeline={self.virtual_pipeline}: the interleaved schedule is "
                "not offered, because megatron-core 0.16.1 with its default point-to-point flags "
                "gives wrong gradients there without an error. Set parallel.virtual_pipeline=1."
            )
        if self.context > 1:
            raise ValueError(
                f"parallel.context={self.context}: context parallelism needs Transformer Engine's "
                "attention and its split of packed rows is not offered yet. Set "
                "parallel.context=1 and shorten rows with batch.micro_batch_tokens instead."
            )
        return self

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor * self.pipeline * self.context


class ArithmeticSource(Section):
    """Generated arithmetic: deterministic by seed, splits disjoint by construction."""

    kind: Literal["arithmetic"]
    name: str = "arithmetic"
    """Name for metrics per source."""
    num_problems: Positive
    split: Literal["train", "heldout"]
    """The two splits share no expression, whatever the seeds."""
    seed: NonNegative = 0
    """Which problems of the split are drawn."""


class ReasoningGymSource(Section):
    """Problems of a reasoning-gym task; ``reward.kind=reasoning_gym`` verifies them."""

    kind: Literal["reasoning_gym"]
    task: str
    """reasoning-gym's name of the task, such as chain_sum."""
    name: str | None = None
    """Name for metrics per source; the task by default."""
    num_problems: Positive
    seed: NonNegative = 0
    """Which problems are generated."""


class FileSource(Section):
    """Problems from a file: JSON, parquet (the DAPO and verl schema), a data set on disk."""

    kind: Literal["jsonl", "json", "parquet", "arrow"]
    """An object a line, one list of them, parquet, or a folder from ``save_to_disk``."""
    path: str
    """The file or folder."""
    name: str | None = None
    """Name for metrics per source; by default the records' data_source or the file's stem."""
    problem_key: str | None = None
    """Key of the problem (text or messages), ``a.b`` if nested; null: problem, question, prompt."""
    answer_key: str | None = None
    """Key of the answer; null: answer, reward_model.ground_truth, or what follows ``####``."""
    limit: Positive | None = None
    """Take only the first so many problems."""


Source = Annotated[ArithmeticSource | ReasoningGymSource | FileSource, Field(discriminator="kind")]


class DataConfig(Section):
    """Training and held-out problems."""

    train: Annotated[tuple[Source, ...], Field(min_length=1, strict=False)]
    """Sources of training problems."""
    heldout: Annotated[tuple[Source, ...], Field(strict=False)] = ()
    """Sources of held-out problems; none of them may be a training problem."""
    max_prompt_tokens: Positive = 1024
    """Longer prompts are dropped and counted."""
    template: Literal["chat", "raw"] = "chat"
    """``chat`` applies the tokenizer's own chat template; ``raw`` takes the text as it is."""
    prompts_per_step: Positive = 512
    """DynaMO's script: 512."""


class BatchConfig(Section):
    """How a step is cut into optimizer steps and forward passes."""

    mini_batch_prompts: Positive | None = None
    """Prompts an optimizer step sees (DynaMO's script: 32); null for all of the step's."""
    micro_batch_tokens: Positive = 8192
    """Longest packed row. A longer sequence gets a row of its own."""
    micro_batch_sequences: Positive | None = None
    """At most so many sequences in a row."""


class RolloutConfig(Section):
    """Sampling."""

    engine: Literal["hf", "vllm"] = "hf"
    """``hf``: transformers' generate inside rank 0's process; ``vllm``: vLLM in its own."""
    mode: Literal["sync", "one_step_off"] = "sync"
    """``one_step_off``: the next step's rollouts are sampled while this one trains."""
    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    """The policy is softmax(logits / temperature): in the sampler, the statistics and the loss."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample from the likeliest tokens that hold this probability; needs accept_truncation_bias."""
    top_k: NonNegative = 0
    """Sample from so many likeliest tokens; 0: from all. Needs accept_truncation_bias."""
    accept_truncation_bias: bool = False
    """Train on tokens of a cut distribution although their probability ratios are biased."""
    max_tokens: Positive = 1024
    """Longest response."""
    batch_size: Positive = 256
    """Sequences generated together by the embedded engine."""
    threads: Positive | None = None
    """CPU threads while rank 0 generates and the other ranks wait; null: OMP_NUM_THREADS."""
    gate_tolerance: Annotated[float, Field(gt=0.0)] = 1e-3
    """Largest |sampler logp - trainer logp| at the first step; above it the run stops."""
    vllm: VllmConfig = VllmConfig()
    """The tier of replicas."""

    @model_validator(mode="after")
    def _overlap(self) -> RolloutConfig:
        if self.mode == "one_step_off" and self.engine == "hf":
            raise ValueError(
                "rollout.mode=one_step_off with rollout.engine=hf: the embedded engine generates "
                "inside rank 0's process, on the device that trains, so nothing would overlap and "
                "the rollouts would be one step stale for no gain. Set rollout.mode=sync, or "
                "rollout.engine=vllm."
            )
        return self

    @model_validator(mode="after")
    def _cut(self) -> RolloutConfig:
        if self.top_p == 1.0 and self.top_k == 0:
            return self
        cut = f"rollout.top_p={self.top_p:g}, rollout.top_k={self.top_k}"
        if self.engine == "hf":
            raise ValueError(
                f"{cut} with rollout.engine=hf: the embedded engine samples from the full "
                "distribution, nothing would be cut. Set rollout.top_p=1.0 and rollout.top_k=0."
            )
        if not self.accept_truncation_bias:
            raise ValueError(
                f"{cut}: tokens would be sampled from a cut and rescaled distribution, while the "
                "trainer's log-probabilities are of the full one. It is another policy: each "
                "probability ratio is off by the mass that the cut keeps, and what it leaves out "
                "is never tried. Set rollout.top_p=1.0 and rollout.top_k=0, or accept the bias "
                "with rollout.accept_truncation_bias=true."
            )
        return self


class RewardConfig(Section):
    """Verification of responses in worker processes."""

    kind: Literal["integer_answer", "math", "reasoning_gym", "function"] = "integer_answer"
    """The last ``Answer: <integer>``; any mathematics; a reasoning-gym task; your own function."""
    function: str | None = None
    """``module:function`` called as f(response: str, answer: str, prompt: str) -> float."""
    workers: Positive = 1
    """Processes that verify."""
    timeout_s: Annotated[float, Field(gt=0.0)] = 10.0
    """A verification that takes longer is killed and counted as failed."""
    shuffle: bool = False
    """Control experiment: rewards are permuted over the whole step. Nothing should be learned."""

    @model_validator(mode="after")
    def _function(self) -> RewardConfig:
        if (self.kind == "function") != (self.function is not None):
            raise ValueError(
                f"reward.kind={self.kind} with reward.function={self.function}: set "
                "reward.function=module:function exactly when reward.kind=function."
            )
        return self


class OptimizerConfig(Section):
    """AdamW (or SGD for tests) with warm-up and decay. One unit of the schedule is one update."""

    name: Literal["adam", "sgd"] = "adam"
    """AdamW, or plain SGD."""
    lr: Annotated[float, Field(gt=0.0)] = 1e-6
    """Peak learning rate; DynaMO's script: 1e-6."""
    min_lr: Annotated[float, Field(ge=0.0)] = 0.0
    """Learning rate after the decay."""
    warmup_updates: NonNegative = 10
    """Updates of linear warm-up, the first of which already moves; DynaMO's script: 10."""
    decay_style: Literal["constant", "linear", "cosine"] = "constant"
    """From the peak to min_lr."""
    decay_updates: Positive | None = None
    """Update at which min_lr is reached; null: the last update of the run."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.1
    """On matrices; norms and biases have none. DynaMO's script: 0.1."""
    beta1: Fraction = 0.9
    """Decay of Adam's first moment."""
    beta2: Fraction = 0.999
    """Decay of Adam's second moment."""
    epsilon: Annotated[float, Field(gt=0.0)] = 1e-8
    """Added to the root of Adam's second moment."""
    clip_grad: Annotated[float, Field(ge=0.0)] = 1.0
    """Largest global gradient norm; 0 switches clipping off."""
    distributed: bool = False
    """Megatron-Core's distributed optimizer: optimizer state sharded over data-parallel ranks."""

    @model_validator(mode="after")
    def _decay_after_warm_up(self) -> OptimizerConfig:
        if self.decay_updates is not None and self.decay_updates <= self.warmup_updates:
            raise ValueError(
                f"optimizer.decay_updates={self.decay_updates} with optimizer.warmup_updates="
                f"{self.warmup_updates}: the decay would end before the peak is reached. Set "
                "decay_updates to more than warmup_updates, or to null for the run's last update."
            )
        return self


class EvaluationConfig(Section):
    """Held-out problems sampled and verified, at the start, at the end and in between.

    pass@1, pass@k and majority vote by source, as ``dynamo-megatron eval`` gives them.
    """

    every: NonNegative = 0
    """Steps between evaluations; 0: only at the start and at the end of the run."""
    samples: Positive = 1
    """Samples of each problem; pass@k and the majority vote need 2 or more."""
    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    """Of the evaluated policy."""
    report: bool = True
    """A page to read each evaluation in, with pictures where observe.plots is set."""


class CheckpointConfig(Section):
    """Megatron-Core distributed checkpoints under ``run.dir``/checkpoints."""

    every: NonNegative = 20
    """Steps between saves; 0 saves only at the end."""
    keep: Positive = 2
    """Newest complete checkpoints that stay."""
    export_hf: bool = True
    """Write the final policy in Hugging Face format as well."""


class ObserveConfig(Section):
    """What the run writes for people."""

    tensorboard: bool = True
    """TensorBoard events beside metrics.jsonl."""
    plots: bool = True
    """PNG plots at the end of the run and of each evaluation."""
    generations_per_step: NonNegative = 8
    """Responses kept for reading."""
    progress: bool = True
    """A progress bar, or plain lines where there is no terminal."""


class Config(Section):
    """One run."""

    run: RunConfig
    model: ModelConfig
    data: DataConfig
    parallel: ParallelConfig = ParallelConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    batch: BatchConfig = BatchConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    observe: ObserveConfig = ObserveConfig()

    @model_validator(mode="after")
    def _temperatures(self) -> Config:
        if self.rollout.engine == "vllm":
            check_temperature("rollout.temperature", self.rollout.temperature)
            check_temperature("evaluation.temperature", self.evaluation.temperature)
        return self

    @model_validator(mode="after")
    def _mini_batches(self) -> Config:
        size = self.batch.mini_batch_prompts
        if size is not None and self.data.prompts_per_step % size:
            raise ValueError(
                f"data.prompts_per_step={self.data.prompts_per_step} is not a multiple of "
                f"batch.mini_batch_prompts={size}: the last optimizer step of every step would see "
                "fewer prompts and weigh them more. Choose a divisor."
            )
        return self


__all__ = [
    "AdvantageConfig",
    "AlgorithmConfig",
    "AllocationConfig",
    "ArithmeticSource",
    "BatchConfig",
    "CheckpointConfig",
    "ClipConfig",
    "Config",
    "CorrectionConfig",
    "DataConfig",
    "EvaluationConfig",
    "FileSource",
    "KlConfig",
    "ModelConfig",
    "ModulationConfig",
    "ObserveConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ReasoningGymSource",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "Section",
    "Source",
    "VllmConfig",
]
