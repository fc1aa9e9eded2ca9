"""How far the sequence-mean stand-in for Q is from the exact Q, on a model's own samples.

The public DynaMO code replaces the expected term Q = sum_a pi_a^2 (log pi_a + H) of the first-order
entropy change by the mean of pi_y Lambda_y over the response's sampled tokens. This samples
responses of a Hugging Face model to arithmetic problems, computes both on the model's logits and
compares the changes |pi_y Lambda_y - Q|, bare and times the GRPO advantage (over tokens with one).

    python benchmarks/sequence_mean_gap.py MODEL_DIR [--problems 64] [--rollouts 16] [--json FILE]
"""

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from dynamo_megatron.algo.advantage import group_advantages
from dynamo_megatron.algo.modulation import entropy_change, sequence_mean_change
from dynamo_megatron.data.arithmetic import arithmetic_problems
from dynamo_megatron.kernels import token_stats
from dynamo_megatron.reward.integer_answer import verify_integer_answer
from dynamo_megatron.types import TokenStats

NO_CLIP = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 10.0}


@dataclass(frozen=True)
class Samples:
    """Response tokens of all sequences.

    Attributes:
        stats: [T] statistics of each token.
        sequence: [T] int64, the sequence it belongs to.
        advantages: [T] GRPO advantages.
        accuracy: Share of right responses.
    """

    stats: TokenStats
    sequence: Tensor
    advantages: Tensor
    accuracy: float


@torch.no_grad()
def sample(model_dir: Path, problems: int, rollouts: int, max_tokens: int, seed: int) -> Samples:
    """Sample, verify, and compute the statistics of every response token."""
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()
    stop = model.generation_config.eos_token_id
    stop = set(stop) if isinstance(stop, list) else {stop}
    torch.manual_seed(seed)
    stats, rewards, groups, lengths = [], [], [], []
    for index, problem in enumerate(arithmetic_problems(problems, seed=seed, split="heldout")):
        chat = [{"role": "user", "content": problem.problem}]
        prompt = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )["input_ids"]
        outputs = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=max_tokens,
            num_return_sequences=rollouts,
            pad_token_id=tokenizer.pad_token_id,
        )
        for ids in outputs:
            response = ids[prompt.shape[1] :].tolist()
            ends = [i for i, token in enumerate(response) if token in stop]
            response = response[: ends[0] + 1] if ends else response
            whole = torch.cat([prompt[0], torch.tensor(response)])
            logits = model(whole[None, :-1]).logits[0, prompt.shape[1] - 1 :].contiguous()
            stats.append(token_stats(logits, torch.tensor(response), vocab_size=logits.shape[1]))
            text = tokenizer.decode(response, skip_special_tokens=True)
            rewards.append(verify_integer_answer(text, problem.answer, problem.problem).reward)
            groups.append(index)
            lengths.append(len(response))
    reward = torch.tensor(rewards)
    advantages = group_advantages(
        reward, torch.tensor(groups), torch.ones(len(rewards), dtype=torch.bool)
    )
    repeat = torch.tensor(lengths)
    fields = ("logp", "entropy", "lam", "sum_pi2", "q")
    return Samples(
        stats=TokenStats(*(torch.cat([getattr(s, name) for s in stats]) for name in fields)),
        sequence=torch.arange(len(lengths)).repeat_interleave(repeat),
        advantages=advantages.repeat_interleave(repeat),
        accuracy=float(reward.mean()),
    )


@dataclass(frozen=True)
class Gap:
    """How the stand-in's change compares with the exact one over T tokens."""

    tokens: int
    spearman: float
    pearson: float
    spearman_top_entropy: float
    median_relative_error_top_entropy: float
    confident_share: float
    confident_mean_exact: float
    confident_mean_stand_in: float
    top_percent_overlap: float
    damped_exact: int
    damped_stand_in: int
    damped_jaccard: float


def compare(exact_T: Tensor, stand_in_T: Tensor, entropy_T: Tensor) -> Gap:
    """All figures of one comparison; changes are >= 0."""
    exact, stand_in = exact_T.double(), stand_in_T.double()
    top = entropy_T >= entropy_T.quantile(0.8)
    sure = entropy_T < 0.01
    count = max(1, exact.numel() // 100)
    first, second = (set(x.topk(count).indices.tolist()) for x in (exact, stand_in))
    # Damped: above tau = 0.9 of the largest change of the set, where the damping sets in.
    damped = [set((x > 0.9 * x.max()).nonzero()[:, 0].tolist()) for x in (exact, stand_in)]
    return Gap(
        tokens=exact.numel(),
        spearman=_pearson(_ranks(exact), _ranks(stand_in)),
        pearson=_pearson(exact, stand_in),
        spearman_top_entropy=_pearson(_ranks(exact[top]), _ranks(stand_in[top])),
        median_relative_error_top_entropy=float(
            ((stand_in[top] - exact[top]).abs() / exact[top].clamp(min=1e-12)).median()
        ),
        confident_share=float(sure.double().mean()),
        confident_mean_exact=float(exact[sure].mean()) if sure.any() else math.nan,
        confident_mean_stand_in=float(stand_in[sure].mean()) if sure.any() else math.nan,
        top_percent_overlap=len(first & second) / count,
        damped_exact=len(damped[0]),
        damped_stand_in=len(damped[1]),
        damped_jaccard=len(damped[0] & damped[1]) / len(damped[0] | damped[1]),
    )


def _ranks(values: Tensor) -> Tensor:
    """Ranks from 0, ties by their mean."""
    _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    return (last - (counts.double() + 1) / 2)[inverse]


def _pearson(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack([a, b]))[0, 1])


def main() -> None:
    """Sample, compare, print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="Hugging Face folder with a chat template")
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="4 problems, 4 rollouts")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.problems, arguments.rollouts = 4, 4
    samples = sample(
        arguments.model,
        arguments.problems,
        arguments.rollouts,
        arguments.max_tokens,
        arguments.seed,
    )
    s = samples.stats
    ones, everywhere = torch.ones_like(s.logp), torch.ones_like(s.logp, dtype=torch.bool)
    gaps = {}
    for name, advantages in (("bare", ones), ("times the advantage", samples.advantages)):
        exact = entropy_change(advantages, ones, s.logp, s.lam, s.q, **NO_CLIP)
        stand_in = sequence_mean_change(
            *(advantages, ones, s.logp, s.lam, samples.sequence, everywhere), **NO_CLIP
        )
        counted = advantages != 0
        if counted.any():
            gaps[name] = compare(exact[counted], stand_in[counted], s.entropy[counted])
    signs = (s.logp.exp() * s.lam - s.q).sign()
    mean_S = torch.zeros(int(samples.sequence.max()) + 1).index_reduce_(
        0, samples.sequence, s.logp.exp() * s.lam, "mean", include_self=False
    )
    agree = (signs == (s.logp.exp() * s.lam - mean_S[samples.sequence]).sign()).double().mean()
    quantiles = s.entropy.quantile(torch.tensor([0.5, 0.8, 0.95])).tolist()
    print(
        f"{s.logp.numel()} tokens of {int(samples.sequence.max()) + 1} responses, accuracy "
        f"{samples.accuracy:.2f}, entropy quantiles 50/80/95 %: "
        + " / ".join(f"{q:.3g}" for q in quantiles)
        + f" nats; the sign of the change agrees on {float(agree):.2f} of the tokens\n"
    )
    print("| figure | " + " | ".join(gaps) + " |\n|---|" + "---|" * len(gaps))
    for field in asdict(next(iter(gaps.values()))):
        cells = [getattr(gap, field) for gap in gaps.values()]
        shown = [f"{c:.3g}" if isinstance(c, float) else str(c) for c in cells]
        print(f"| {field.replace('_', ' ')} | " + " | ".join(shown) + " |")
    if arguments.json:
        arguments.json.write_text(json.dumps({n: asdict(g) for n, g in gaps.items()}, indent=1))


if __name__ == "__main__":
    main()
