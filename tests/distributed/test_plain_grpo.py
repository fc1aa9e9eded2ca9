"""With everything switched off the product is plain GRPO, bit for bit.

``plain_grpo_step`` is written from the paper (arXiv:2402.03300, with the token-mean of
arXiv:2503.14476) and uses nothing of the product but the network's forward pass.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from dynamo_megatron.actor.model import HeadSettings, build_model
from dynamo_megatron.actor.topology import init_topology
from dynamo_megatron.actor.weights import export_hf_weights, load_hf_weights
from dynamo_megatron.batching.pack import pack
from dynamo_megatron.config import AlgorithmConfig, AllocationConfig, ModulationConfig
from dynamo_megatron.hf.architecture import read_architecture
from dynamo_megatron.hf.reader import SafetensorsReader
from dynamo_megatron.stages.advantages import rollout_advantages
from dynamo_megatron.stages.allocation import allocate
from dynamo_megatron.stages.modulation import modulate_batch
from dynamo_megatron.types import (
    FinishReason,
    Prompt,
    Rollout,
    RolloutGroup,
    TokenInputs,
    Verdict,
)
from tests.policies import (
    VOCAB,
    Layout,
    hf_weights,
    optimizer_settings,
    plan_for,
    policy_on,
    write_qwen3,
)
from tests.ranks import run_on_ranks

REWARDS = [[1.0, 0.0, 0.0], [1.0, 1.0, 1.0], [0.0, 1.0, 1.0], [0.0, 0.0, 1.0]]
LR, BETAS, EPS, WEIGHT_DECAY, CLIP_GRAD = 1e-3, (0.9, 0.95), 1e-6, 0.1, 0.5
TEMPERATURE = 0.8


def sampled_groups() -> list[RolloutGroup]:
    g = torch.Generator().manual_seed(11)
    groups = []
    for p, rewards in enumerate(REWARDS):
        prompt = Prompt(
            id=f"p{p}",
            text="",
            token_ids=tuple(torch.randint(0, VOCAB, (3 + p,), generator=g).tolist()),
            answer="",
            source="test",
        )
        rollouts = []
        for k in range(len(rewards)):
            ids = torch.randint(0, VOCAB, (2 + (k + p) % 4,), generator=g).tolist()
            rollouts.append(
                Rollout(
                    prompt_id=prompt.id,
                    index=k,
                    token_ids=tuple(ids),
                    logprobs=(0.0,) * len(ids),
                    finish_reason=FinishReason.STOP,
                    weight_version=0,
                    seed=0,
                    text="",
                )
            )
        verdicts = tuple(Verdict(reward=r) for r in rewards)
        groups.append(RolloutGroup(prompt=prompt, rollouts=tuple(rollouts), verdicts=verdicts))
    return groups


def plain_grpo_step(network, optimizer, groups) -> None:
    """One GRPO update on one packed row: advantages, clipped loss, token mean, clip, AdamW."""
    ids, rows, targets, advantages, starts = [], [], [], [], [0]
    for prompt, answers in groups:
        rewards = torch.tensor([reward for _, reward in answers], dtype=torch.float64)
        mean, std = rewards.mean(), rewards.std()
        for answer, reward in answers:
            sequence = [*prompt, *answer]
            rows += range(starts[-1] + len(prompt) - 1, starts[-1] + len(sequence) - 1)
            ids += sequence[:-1]
            targets += answer
            advantages += [float((reward - mean) / (std + 1e-6)) if std > 0 else 0.0] * len(answer)
            starts.append(len(ids))
    longest = max(b - a for a, b in pairwise(starts))
    cu = torch.tensor(starts, dtype=torch.int32)
    stats = network(
        input_ids=torch.tensor([ids]),
        position_ids=torch.cat([torch.arange(b - a) for a, b in pairwise(starts)])[None],
        attention_mask=None,
        labels=torch.tensor(targets),
        loss_mask=torch.tensor(rows),
        packed_seq_params=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=cu,
            cu_seqlens_kv=cu,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
    )
    advantage = torch.tensor(advantages, dtype=torch.float32)
    # On-policy: the old log-probabilities are those of this very forward pass.
    ratio = torch.exp((stats.logp - stats.logp.detach()).clamp(-20, 20))
    loss = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.28))
    for p in network.parameters():
        p.grad = None
    loss.sum().backward()
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    grads = [p.grad.mul_(1.0 / torch.tensor(len(targets))) for p in parameters]
    # The square and the root are how Megatron-Core rounds the norm (it sums squares over ranks).
    norm = (torch.stack([g.norm() for g in grads]).norm() ** 2).item() ** 0.5
    assert norm > CLIP_GRAD, "the test must clip"
    for g in grads:
        g.mul_(CLIP_GRAD / (norm + 1e-6))
    optimizer.step()


def _plain(model_dir) -> dict:
    groups = [
        (
            list(group.prompt.token_ids),
            [
                (list(r.token_ids), v.reward)
                for r, v in zip(group.rollouts, group.verdicts, strict=True)
            ],
        )
        for group in sampled_groups()
    ]
    arch, topology = read_architecture(model_dir), init_topology(tensor=1, pipeline=1, seed=1)
    network = build_model(
        arch,
        topology,
        HeadSettings(temperature=TEMPERATURE, vocab_size=VOCAB),
        vocab_multiple=4,
    )
    with SafetensorsReader(model_dir) as reader:
        load_hf_weights(network, reader, arch, topology)
    optimizer = torch.optim.AdamW(
        [
            {
                "params": [p for p in network.parameters() if (p.dim() > 1) == matrix],
                "weight_decay": WEIGHT_DECAY * matrix,
            }
            for matrix in (True, False)
        ],
        lr=LR,
        betas=BETAS,
        eps=EPS,
    )
    for _ in range(2):
        plain_grpo_step(network, optimizer, groups)
    return dict(export_hf_weights(network, arch, topology, vocab_multiple=4))


def _product(model_dir, **switches) -> dict:
    config = AlgorithmConfig(
        allocation=AllocationConfig(policy="uniform", n_low=3, n_mean=3, n_high=3, init=3),
        modulation=ModulationConfig(
            **({"gradient_compensation": False, "stabilization": False} | switches)
        ),
    )
    groups = sampled_groups()
    sizes = allocate([group.prompt for group in groups], None, config.allocation)
    assert sizes.sizes == (3, 3, 3, 3)
    optimizer = optimizer_settings("adam", clip_grad=CLIP_GRAD)
    with policy_on(model_dir, Layout(), optimizer=optimizer, temperature=TEMPERATURE) as policy:
        batch = pack(groups, rollout_advantages(groups, config))
        for _ in range(2):
            plan = plan_for(policy, batch, row_tokens=512)
            assert len(plan) == len(plan[0].micro_batches[0]) == 1
            old = policy.token_stats(batch, plan)
            modulated = modulate_batch(
                batch, plan, old, config.modulation, config.clip, group=policy.topology.world_group
            )
            policy.update(
                plan,
                TokenInputs(advantages=modulated.batch.advantages, old_logp=old.stats.logp),
            )
        return hf_weights(policy)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_qwen3(tmp_path_factory.mktemp("qwen3"))


def test_everything_off_is_plain_grpo_bit_for_bit(model_dir):
    plain = run_on_ranks(_plain, 1, model_dir)[0]
    product = run_on_ranks(_product, 1, model_dir)[0]
    different = [name for name in plain if not torch.equal(plain[name], product[name])]
    assert different == []


@pytest.mark.parametrize("switch", ["gradient_compensation", "stabilization"])
def test_each_modulation_switch_alone_changes_the_update(switch, model_dir):
    off = run_on_ranks(_product, 1, model_dir)[0]
    # tau 0.5, so that the few tokens of this batch are damped as well
    on = run_on_ranks(lambda: _product(model_dir, **{switch: True, "tau": 0.5}), 1)[0]
    assert any(not torch.equal(on[name], off[name]) for name in off)
