"""The exported policy, loaded by plain transformers, writes what the training model would write."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from dynamo_megatron.checkpoint.export import export_hf
from dynamo_megatron.types import TrainBatch, ragged_offsets
from tests.distributed.test_hf_parity import _dense_logits
from tests.policies import VOCAB, Layout, plan_for, write_model
from tests.ranks import run_on_ranks
from tests.unit.checkpoint.helpers import policy, train

PROMPTS = ([3, 14, 15, 92, 65], [7], [60, 2, 60, 2, 60, 2, 60, 2, 60], [88, 40])
NUM_TOKENS = 40
TIE = 1e-5
"""Two tokens whose logits are nearer than this may come in either order."""


def greedy(run) -> tuple[list[list[int]], list[list[float]]]:
    """Tokens by decoding step by step, all prompts in one packed row; the gap to the second."""
    written = [[] for _ in PROMPTS]
    gaps = [[] for _ in PROMPTS]
    for _ in range(NUM_TOKENS):
        sequences = [[*p, *w, 0] for p, w in zip(PROMPTS, written, strict=True)]
        count = len(sequences)
        batch = TrainBatch(
            tokens=torch.tensor([token for s in sequences for token in s]),
            token_offsets=ragged_offsets([len(s) for s in sequences]),
            prompt_lengths=torch.tensor([len(s) - 1 for s in sequences]),
            response_offsets=ragged_offsets([1] * count),
            group_index=torch.arange(count),
            sampler_logp=torch.zeros(count),
            advantages=torch.zeros(count),
        )
        plan = plan_for(run, batch, num_groups=count, groups_per_mini_batch=count, row_tokens=1024)
        (row,) = plan[0].micro_batches[0]
        logits = _dense_logits(run, row)[row.rows, :VOCAB]
        for place, scores in zip(row.token_index.tolist(), logits, strict=True):
            first, second = scores.topk(2).values.tolist()
            written[place].append(int(scores.argmax()))
            gaps[place].append(first - second)
    return written, gaps


@pytest.mark.parametrize("layout", [Layout(), Layout(tensor=2)], ids=["tp1", "tp2"])
@pytest.mark.parametrize(
    ("family", "tied"), [("qwen2", False), ("qwen3", False), ("llama3", False), ("smollm2", True)]
)
def test_free_greedy_generation_is_the_training_models_own(tmp_path, family, tied, layout):
    ends = {"bos_token_id": None, "eos_token_id": None}  # nothing ends a response early
    source = write_model(tmp_path / "hf", family, tied=tied, **ends)
    out = tmp_path / "out"

    def work():
        with policy(source, layout) as run, torch.no_grad():
            with torch.enable_grad():
                train(run, range(2))
            export_hf(run, source, out)
            return greedy(run)

    written, gaps = run_on_ranks(work, layout.world_size, timeout=120)[0]
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    tokens = set()
    for prompt, want, gap in zip(PROMPTS, written, gaps, strict=True):
        got = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=NUM_TOKENS,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        assert len(got) == NUM_TOKENS
        same = next((n for n, (a, b) in enumerate(zip(got, want, strict=True)) if a != b), None)
        assert same is None or gap[same] < TIE, (same, gap[same], got, want)
        tokens |= set(got)
    assert len(tokens) > 8, "a model that repeats itself would prove little"
