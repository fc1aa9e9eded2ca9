"""Make the tiny policy that ships in ``dynamo_megatron/assets/tiny_policy``.

    python tools/make_tiny_policy.py [--out DIR] [--seed N]

A 4-layer Qwen3 model with its byte-level tokenizer, warm-started by supervised training on worked
solutions of ``dynamo_megatron.data.arithmetic``, training split only. Reinforcement learning needs
a start that is right often enough to earn rewards and wrong often enough to learn from them, so
this one is left imperfect on purpose, in two ways:

* **Careless examples.** The worked solutions come from a careless calculator that drops each carry
  or borrow with probability ``SLIP_RATE``, one half, and goes on from the wrong partial sum. The
  policy learns both continuations as about equally likely, so decoding greedily is hardly better
  than sampling. Most of what reinforcement learning gains here is to choose between two ways of
  adding that it was taught; the reward alone tells it which.
* **Short training.** About two passes over 100,000 problems: even sums without a carry go wrong at
  times.

So the gain shows that the learning signal arrives, from the reward through the advantages to the
weights. It does not show a new ability.

The held-out evaluation printed at the end, for seed 0 (512 problems, 16 samples, temperature 1):
right format 100.0 %, sampled pass@1 36.6 %, greedy pass@1 39.1 %; 84 % of the problems are neither
always right nor always wrong.

The weights are bitwise reproducible for one seed, torch version and machine. The script computes
with one thread, because the number of threads changes the order of summation; it takes about 10
minutes.
"""

import argparse
import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from dynamo_megatron.data.arithmetic import (
    MAX_PARTIAL_SUM,
    ArithmeticProblem,
    arithmetic_problems,
)

DEFAULT_OUT = Path(__file__).parents[1] / "dynamo_megatron" / "assets" / "tiny_policy"

SLIP_RATE = 0.5
NUM_STEPS = 3000
BATCH_SIZE = 64
PEAK_LR = 3e-3
NUM_TRAIN_PROBLEMS = 100_000
MAX_NEW_TOKENS = 48

PAD, BOS, EOS, USER, ASSISTANT = "<|pad|>", "<|bos|>", "<|eos|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (PAD, BOS, EOS, USER, ASSISTANT)
WHOLE_WORDS = ("Compute ", "Answer: ")

CHAT_TEMPLATE = (
    "{{- bos_token }}"
    "{%- for message in messages %}"
    "{%- if message['role'] == 'user' %}"
    "{{- '<|user|>' + message['content'] }}"
    "{%- elif message['role'] == 'assistant' %}"
    "{{- '<|assistant|>' + message['content'] + eos_token }}"
    "{%- else %}"
    "{{- raise_exception('this chat has the roles user and assistant only, got '"
    " + message['role']) }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"
)


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build the byte-level tokenizer: 5 special tokens, 256 bytes, two words in one token each.

    Any text is encoded, and decoded to itself. The 14 merges that spell the two words bring the
    vocabulary to 275 entries: odd, so that every tensor-parallel layout has to pad it.
    """
    vocab = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocab[symbol] = len(vocab)
    merges = []
    for word in WHOLE_WORDS:
        symbols = word.replace(" ", "\u0120")  # the byte-level alphabet's letter for a space
        for end in range(2, len(symbols) + 1):
            merges.append((symbols[: end - 1], symbols[end - 1]))
            vocab[symbols[:end]] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_max_length=256,
    )


def build_config(tokenizer: PreTrainedTokenizerFast) -> Qwen3Config:
    """Describe the smallest Qwen3 that divides by 4 (tensor) and 2 (pipeline) and learns sums.

    The embeddings are untied, as in the larger Qwen3 models: the output layer costs 70 kB here, and
    a tied one on two pipeline stages needs a second, synchronised copy. ``head_dim`` is 32, the
    smallest size that attention kernels commonly take, and not hidden / heads.
    """
    return Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=False,
        attention_bias=False,
        initializer_range=0.05,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        dtype="float32",
    )


def careless_sum(total: int, operand: int, rng: random.Random, slip_rate: float) -> int:
    """Add place by place, dropping each carry or borrow with probability ``slip_rate``."""
    sign = 1 if operand >= 0 else -1
    result, carry, place = 0, 0, 1
    left, right = total, abs(operand)
    while left or right or carry:
        digit = left % 10 + sign * (right % 10 + carry)
        result += digit % 10 * place
        carry = int(not 0 <= digit <= 9)
        if carry and rng.random() < slip_rate:
            carry = 0
        left, right, place = left // 10, right // 10, place * 10
    return result


def worked_solution(operands: tuple[int, ...], rng: random.Random, slip_rate: float) -> str:
    """Write one line a step and the answer, as the careless calculator does.

    A slip after which a later partial sum would leave the range of the task is not made.
    """
    total, lines = operands[0], []
    for index, operand in enumerate(operands[1:], start=1):
        result = careless_sum(total, operand, rng, slip_rate)
        ahead = accumulate(operands[index + 1 :], initial=result)
        if not all(0 <= partial_sum <= MAX_PARTIAL_SUM for partial_sum in ahead):
            result = total + operand
        lines.append(f"{total}{operand:+d}={result}")
        total = result
    return "\n".join([*lines, f"Answer: {total}"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A prompt with its worked solution, as token ids; the loss covers the solution only."""

    token_ids: list[int]
    num_prompt_tokens: int


def encode_examples(
    problems: list[ArithmeticProblem], tokenizer: PreTrainedTokenizerFast, rng: random.Random
) -> list[Example]:
    """Write one careless solution for each problem and encode both with the chat's markers."""
    prompts = [f"{BOS}{USER}{p.problem}{ASSISTANT}" for p in problems]
    solutions = [f"{worked_solution(p.operands, rng, SLIP_RATE)}{EOS}" for p in problems]
    return [
        Example(token_ids=prompt + solution, num_prompt_tokens=len(prompt))
        for prompt, solution in zip(
            tokenizer(prompts)["input_ids"], tokenizer(solutions)["input_ids"], strict=True
        )
    ]


def batches(examples: list[Example], rng: random.Random) -> Iterator[list[Example]]:
    """Yield shuffled batches of examples of similar length for ever."""
    pool_size = 16 * BATCH_SIZE
    while True:
        order = rng.sample(examples, len(examples))
        for start in range(0, len(order) - pool_size + 1, pool_size):
            pool = sorted(order[start : start + pool_size], key=lambda e: len(e.token_ids))
            chunks = [pool[i : i + BATCH_SIZE] for i in range(0, pool_size, BATCH_SIZE)]
            yield from rng.sample(chunks, len(chunks))


def solution_loss(model: Qwen3ForCausalLM, batch: list[Example]) -> torch.Tensor:
    """Mean cross-entropy of the solutions' tokens (right padding, which causal masking ignores)."""
    longest = max(len(example.token_ids) for example in batch)
    input_ids = torch.full((len(batch), longest), model.config.pad_token_id)
    labels = torch.full((len(batch), longest), -100)
    for row, example in enumerate(batch):
        token_ids = torch.tensor(example.token_ids)
        input_ids[row, : len(token_ids)] = token_ids
        labels[row, example.num_prompt_tokens : len(token_ids)] = token_ids[
            example.num_prompt_tokens :
        ]
    logits = model(input_ids=input_ids, use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def train(model: Qwen3ForCausalLM, examples: list[Example], rng: random.Random) -> None:
    """Train in place: AdamW, 100 steps of warm-up, cosine decay to a tenth of the peak."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=PEAK_LR, betas=(0.9, 0.98), weight_decay=0.01
    )
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.01, total_iters=100),
            torch.optim.lr_scheduler.CosineAnnealingLR(
                optimizer, T_max=NUM_STEPS - 100, eta_min=PEAK_LR / 10
            ),
        ],
        milestones=[100],
    )
    start = time.monotonic()
    for step, batch in zip(range(1, NUM_STEPS + 1), batches(examples, rng), strict=False):
        loss = solution_loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 100 == 0:
            print(f"step {step:5d}  loss {loss.item():.4f}  {time.monotonic() - start:6.0f} s")


@torch.no_grad()
def sample(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: list[ArithmeticProblem],
    *,
    num_samples: int,
    greedy: bool = False,
) -> list[list[str]]:
    """Sample ``num_samples`` answers to each problem at temperature 1, or one greedy answer."""
    answers: list[list[str]] = []
    for start in range(0, len(problems), 32):
        chats = [[{"role": "user", "content": p.problem}] for p in problems[start : start + 32]]
        inputs = tokenizer.apply_chat_template(
            chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        )
        output = model.generate(
            **inputs,
            do_sample=not greedy,
            num_return_sequences=1 if greedy else num_samples,
            max_new_tokens=MAX_NEW_TOKENS,
        )
        texts = tokenizer.batch_decode(
            output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        per_problem = len(texts) // len(chats)
        answers.extend(texts[i : i + per_problem] for i in range(0, len(texts), per_problem))
    return answers


def answer_of(text: str) -> str | None:
    """Return the integer of a last line ``Answer: <integer>``, or None in any other format."""
    last_line = text.rsplit("\n", 1)[-1]
    number = last_line.removeprefix("Answer: ")
    return number if last_line != number and number.isdecimal() else None


def report(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    """Print what the policy can do on 512 held-out problems."""
    problems = arithmetic_problems(512, seed=1, split="heldout")
    sampled = sample(model, tokenizer, problems, num_samples=16)
    greedy = sample(model, tokenizer, problems, num_samples=1, greedy=True)
    passes = [
        sum(answer_of(text) == p.answer for text in texts)
        for p, texts in zip(problems, sampled, strict=True)
    ]
    formatted = sum(answer_of(text) is not None for texts in sampled for text in texts)
    right = sum(answer_of(texts[0]) == p.answer for p, texts in zip(problems, greedy, strict=True))
    num_problems, num_sampled = len(problems), 16 * len(problems)
    print(f"held-out problems {num_problems}, 16 samples each at temperature 1, 1 thread")
    print(f"right format      {formatted / num_sampled:7.1%}")
    print(f"sampled pass@1    {sum(passes) / num_sampled:7.1%}")
    print(f"greedy pass@1     {right / num_problems:7.1%}")
    print("problems by how many of 16 samples are right:")
    for low, high in ((0, 0), (1, 4), (5, 8), (9, 12), (13, 15), (16, 16)):
        share = sum(low <= count <= high for count in passes) / num_problems
        print(f"  {low:2d} to {high:2d}  {share:6.1%}  {'#' * round(share * 60)}")
    for num_terms in (3, 4):
        counts = [c for p, c in zip(problems, passes, strict=True) if p.num_terms == num_terms]
        print(f"  {num_terms} terms: {sum(counts) / (16 * len(counts)):6.1%} of {len(counts)}")
    for num_carries in range(5):
        counts = [c for p, c in zip(problems, passes, strict=True) if p.num_carries == num_carries]
        print(f"  {num_carries} carries: {sum(counts) / (16 * len(counts)):6.1%} of {len(counts)}")


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the folder that ``from_pretrained`` reads, with transformers 4 or 5."""
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    # transformers 5 writes the class's new name; transformers 4 knows only the old one, 5 both.
    path = out / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
    del settings["backend"]
    path.write_text(json.dumps(settings, indent=2) + "\n")


def main() -> None:
    """Build, train, save and evaluate."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights, examples, samples")
    args = parser.parse_args()

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    tokenizer = build_tokenizer()
    model = Qwen3ForCausalLM(build_config(tokenizer))
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=1.0,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    print(f"{model.num_parameters():,} parameters, vocabulary {len(tokenizer)}")
    problems = arithmetic_problems(NUM_TRAIN_PROBLEMS, seed=args.seed, split="train")
    train(model.train(), encode_examples(problems, tokenizer, rng), rng)
    save(model.eval(), tokenizer, args.out)
    report(model, tokenizer)


if __name__ == "__main__":
    main()
