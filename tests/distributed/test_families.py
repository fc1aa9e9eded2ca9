"""Every family, tied and untied, is the model that transformers computes, on every layout."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from dynamo_megatron.hf.reader import SafetensorsReader
from tests.distributed.test_hf_parity import _dense_logits, _sequences
from tests.policies import (
    FAMILIES,
    VOCAB,
    Layout,
    hf_weights,
    plan_for,
    policy_on,
    random_batch,
    write_model,
)
from tests.ranks import run_on_ranks

LAYOUTS = {
    "tp1": Layout(),
    "tp2": Layout(tensor=2),
    "tp4": Layout(tensor=4),
    "tp2xpp2": Layout(tensor=2, pipeline=2),
    "pp4": Layout(pipeline=4),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return request.param


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def model_dir(request, family, tmp_path_factory):
    return write_model(tmp_path_factory.mktemp(family), family, tied=request.param)


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_policy_is_the_model_and_goes_out_as_it_came(model_dir, name):
    layout, batch = LAYOUTS[name], random_batch()

    def work():
        with policy_on(model_dir, layout, temperature=1.0) as policy, torch.no_grad():
            weights = hf_weights(policy)
            logits = None
            if layout.pipeline == 1:
                (row,) = plan_for(policy, batch, row_tokens=512)[0].micro_batches[0]
                logits = _dense_logits(policy, row)[:, :VOCAB]
            return weights, logits, policy.token_stats(batch, plan_for(policy, batch)).stats.logp

    ranks = run_on_ranks(work, layout.world_size)
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        want = [model(s[None, :-1]).logits[0] for s in _sequences(batch)]
    weights, logits, logp = ranks[0]
    if logits is not None:
        assert (logits - torch.cat(want)).abs().max() < 2e-5
    logp = torch.stack([rank[2] for rank in ranks]).amin(0)  # zero where another stage owns it
    pieces = zip(want, _sequences(batch), batch.prompt_lengths.tolist(), strict=True)
    want_logp = [
        scores.log_softmax(-1)[p - 1 :].gather(1, s[p:, None])[:, 0] for scores, s, p in pieces
    ]
    torch.testing.assert_close(logp, torch.cat(want_logp), rtol=0, atol=2e-5)
    with SafetensorsReader(model_dir) as reader:
        assert weights.keys() == reader.names()
        assert all(torch.equal(weights[n], reader.tensor(n)) for n in weights)
