"""Masks and cache of the decode loop."""

import torch
from torch.nn.functional import scaled_dot_product_attention

from dynamo_megatron.rollout.kv_cache import InPlaceCache, grouped_attention, prompt_mask


def test_a_left_padded_prompt_is_masked_causally_and_padding_sees_only_itself():
    mask = prompt_mask(torch.tensor([3, 1]), 3)
    assert mask.shape == (2, 1, 3, 3)
    assert mask[0, 0].int().tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    assert mask[1, 0].int().tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1]]


def test_grouped_attention_equals_repeating_every_key_value_head():
    g = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, 3, 2, 5, 8, generator=g)
    for length in (1, 5):
        query = torch.randn(3, 6, length, 8, generator=g)
        mask = torch.ones(3, 1, length, 5, dtype=torch.bool).tril(5 - length)
        expected = scaled_dot_product_attention(
            query,
            key.repeat_interleave(3, dim=1),
            value.repeat_interleave(3, dim=1),
            attn_mask=mask,
            scale=0.3,
        )
        got, _ = grouped_attention(torch.nn.Identity(), query, key, value, mask, 0.3)
        torch.testing.assert_close(got, expected.transpose(1, 2))


def test_the_cache_returns_all_it_was_given_and_follows_its_rows():
    cache = InPlaceCache(num_layers=1, room=1)
    parts = torch.arange(3 * 2 * 5 * 1, dtype=torch.float32).reshape(3, 2, 5, 1)
    cache.update(parts[:, :, :2], -parts[:, :, :2], 0)
    cache.update(parts[:, :, 2:3], -parts[:, :, 2:3], 0)  # the room is used up here
    cache.select(torch.tensor([2, 0, 0]))
    rest = parts[[2, 0, 0]][:, :, 3:]
    keys, values = cache.update(rest, -rest, 0)
    assert torch.equal(keys, parts[[2, 0, 0]])
    assert torch.equal(values, -parts[[2, 0, 0]])
    assert cache.get_seq_length() == 5
