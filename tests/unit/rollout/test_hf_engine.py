"""The embedded engine against transformers and against its own promises."""

import random
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from dynamo_megatron.assets import TINY_POLICY
from dynamo_megatron.rollout.errors import RolloutError
from dynamo_megatron.rollout.seeds import rollout_seed
from dynamo_megatron.types import FinishReason
from tests.unit.rollout.conftest import PAD, STOP, engine_of, sizes_of


def sample(engine, prompts, counts, *, step=0, temperature=1.0, seed=0):
    return engine.generate(
        prompts, sizes_of(prompts, counts), step=step, temperature=temperature, seed=seed
    )


def tokens_by_identity(rollouts):
    return {(r.prompt_id, r.index): r.token_ids for r in rollouts}


def test_every_prompt_gets_exactly_its_number_of_rollouts_in_order(engine, prompts):
    rollouts = sample(engine, prompts, (3, 0, 1, 5, 2))
    assert [(r.prompt_id, r.index) for r in rollouts] == [
        (f"prompt-{place}", k) for place, size in enumerate((3, 0, 1, 5, 2)) for k in range(size)
    ]
    assert all(r.seed == rollout_seed(0, 0, r.prompt_id, r.index) for r in rollouts)
    assert sample(engine, prompts, (0,) * 5) == []


def test_stop_tokens_belong_to_the_response_and_texts_hold_none(engine, prompts, tokenizer):
    rollouts = sample(engine, prompts, (8,) * 5, temperature=1.3)
    assert {r.finish_reason for r in rollouts} == set(FinishReason)
    for r in rollouts:
        assert (r.token_ids[-1] == STOP) == (r.finish_reason is FinishReason.STOP)
        assert STOP not in r.token_ids[:-1]
        if r.finish_reason is FinishReason.LENGTH:
            assert len(r.token_ids) == 24
        assert r.text == tokenizer.decode(r.token_ids, skip_special_tokens=True)
        assert tokenizer.decode([STOP]) not in r.text


def test_tokens_do_not_depend_on_the_batch_they_are_sampled_in(engine, prompts):
    counts = (4, 1, 3, 2, 5)
    expected = sample(engine, prompts, counts)
    for batch_size in (1, 3):
        other = sample(engine_of(TINY_POLICY, batch_size=batch_size), prompts, counts)
        assert tokens_by_identity(other) == tokens_by_identity(expected)
    order = [3, 0, 4, 2, 1]
    permuted = sample(engine, [prompts[i] for i in order], [counts[i] for i in order])
    assert tokens_by_identity(permuted) == tokens_by_identity(expected)
    alone = sample(engine, prompts[1:2], (1,))
    assert tokens_by_identity(alone).items() <= tokens_by_identity(expected).items()


def test_rollouts_differ_by_number_step_and_seed(engine, prompts):
    first = tokens_by_identity(sample(engine, prompts, (6,) * 5, temperature=4.0))
    assert len(set(first.values())) == 30
    assert tokens_by_identity(sample(engine, prompts, (6,) * 5, temperature=4.0)) == first
    for change in ({"step": 1}, {"seed": 1}):
        other = tokens_by_identity(sample(engine, prompts, (6,) * 5, temperature=4.0, **change))
        assert sum(other[key] == first[key] for key in first) <= 1


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.4])
def test_logprobs_equal_a_forward_pass_over_the_whole_sequence(engine, prompts, model, temperature):
    by_id = {p.id: p for p in prompts}
    for rollout in sample(engine, prompts, (3, 1, 2, 2, 2), temperature=temperature):
        prompt = by_id[rollout.prompt_id].token_ids
        ids = torch.tensor([prompt + rollout.token_ids])
        with torch.inference_mode():
            logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1]
        expected = (logits / temperature).log_softmax(-1)
        expected = expected.gather(1, torch.tensor(rollout.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(rollout.logprobs), expected, rtol=0.0, atol=2e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_greedy_decoding_equals_transformers_generate(prompts, tied, tied_path):
    path = tied_path if tied else TINY_POLICY
    reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    rollouts = sample(engine_of(path), prompts, (1,) * 5, temperature=None)
    for prompt, rollout in zip(prompts, rollouts, strict=True):
        ids = torch.tensor([prompt.token_ids])
        expected = reference.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=24,
            eos_token_id=STOP,
            pad_token_id=PAD,
        )[0, len(prompt.token_ids) :]
        assert list(rollout.token_ids) == expected.tolist()


def test_first_tokens_follow_the_models_own_distribution(engine, prompts, model):
    with torch.inference_mode():
        probs = model(torch.tensor([prompts[1].token_ids])).logits[0, -1].div(5.0).softmax(-1)
    count = 1500
    one_token = engine_of(TINY_POLICY, max_tokens=1, batch_size=512)
    rollouts = sample(one_token, prompts[1:2], (count,), temperature=5.0)
    observed = torch.bincount(torch.tensor([r.token_ids[0] for r in rollouts]), minlength=275)
    likely = probs * count >= 8
    expected = torch.cat([probs[likely], probs[~likely].sum()[None]]) * count
    seen = torch.cat([observed[likely], observed[~likely].sum()[None]])
    chi2 = float(((seen - expected) ** 2 / expected).sum())
    freedom = len(expected) - 1
    assert freedom >= 3, "the test needs several likely tokens"
    assert chi2 < freedom + 4.5 * (2 * freedom) ** 0.5  # far in the tail, seeds are fixed


def test_sampling_leaves_global_generators_and_threads_alone(prompts):
    torch.manual_seed(3)
    random.seed(3)
    torch_state, threads = torch.get_rng_state(), torch.get_num_threads()
    python_state = random.getstate()
    sample(engine_of(TINY_POLICY, num_threads=threads + 1, max_tokens=2), prompts, (2,) * 5)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state
    assert torch.get_num_threads() == threads


def test_a_prompt_that_leaves_no_room_is_refused_before_sampling(prompts):
    tight = engine_of(TINY_POLICY, max_tokens=256 - len(prompts[0].token_ids))
    assert len(sample(tight, prompts[:1], (1,))) == 1  # exactly fits
    with pytest.raises(RolloutError, match=r"prompt prompt-1 has \d+ tokens.*256 positions"):
        sample(tight, prompts[:2], (1, 1))
    with pytest.raises(RolloutError, match="prompt empty has 0 tokens"):
        sample(tight, [replace(prompts[0], id="empty", token_ids=())], (1,))


def test_prompts_in_another_order_than_the_sizes_are_refused(engine, prompts):
    sizes = sizes_of(prompts, (1,) * 5)
    with pytest.raises(RolloutError, match=r"order of sizes\.prompt_ids"):
        engine.generate(prompts[::-1], sizes, step=0, temperature=1.0, seed=0)


def test_nothing_is_sampled_before_weights_are_loaded(prompts):
    with pytest.raises(RolloutError, match="Call load_weights before generate"):
        sample(engine_of(TINY_POLICY, version=None), prompts, (1,) * 5)


def test_broken_weights_are_not_sampled_from(prompts, model):
    engine = engine_of(TINY_POLICY)
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    weights["model.norm.weight"][0] = float("nan")
    engine.load_weights(weights.items(), version=1)
    with pytest.raises(RolloutError, match="rollout 0 of prompt prompt-0: the policy's weights"):
        sample(engine, prompts, (1,) * 5)


def test_a_model_with_sliding_windows_is_refused(tmp_path):
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(TINY_POLICY)
    config.use_sliding_window, config.sliding_window = True, 8
    config.layer_types = ["sliding_attention"] * 4
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(RolloutError, match="sliding-window"):
        engine_of(tmp_path)


@pytest.mark.parametrize("change", [{"max_tokens": 0}, {"batch_size": 0}, {"stop_token_ids": ()}])
def test_settings_that_cannot_work_are_refused(change):
    with pytest.raises(RolloutError, match=next(iter(change))):
        engine_of(TINY_POLICY, **change)


def test_long_responses_outgrow_the_first_room_of_the_cache(prompts, model):
    # 100 tokens without a stop: the cache starts with room for 64.
    never = engine_of(TINY_POLICY, max_tokens=100, stop_token_ids=(100,))
    rollout = sample(never, prompts[:2], (1, 1), temperature=None)[1]
    ids = torch.tensor([prompts[1].token_ids])
    expected = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=100,
        eos_token_id=100,
        pad_token_id=PAD,
    )[0, ids.shape[1] :]
    assert list(rollout.token_ids) == expected.tolist()
    assert len(rollout.token_ids) == 100
