"""The Megatron policy is the Hugging Face model: logits, loss, gradients, and weights out again."""

from __future__ import annotations

import pytest
import torch
from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region
from transformers import AutoModelForCausalLM

from dynamo_megatron.actor.forward_step import packed_parameters
from dynamo_megatron.assets import TINY_POLICY
from dynamo_megatron.hf.architecture import ArchitectureError, read_architecture
from dynamo_megatron.hf.reader import SafetensorsReader, WeightsError
from tests.policies import (
    VOCAB,
    Layout,
    hf_gradients,
    hf_weights,
    plan_for,
    policy_on,
    prepared,
    random_batch,
    relative_distance,
    write_qwen3,
)
from tests.ranks import run_on_ranks

TEMPERATURE = 0.8


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def model_dir(request, tmp_path_factory):
    return write_qwen3(tmp_path_factory.mktemp("qwen3"), tied=request.param)


def _reference(model_dir):
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)


def _sequences(batch):
    return batch.tokens.split((batch.token_offsets[1:] - batch.token_offsets[:-1]).tolist())


def _dense_logits(policy, row):
    """Logits of every position through the model's own output layer, vocabulary gathered."""
    module = policy.module
    module.post_process = False  # stop before the head
    hidden = module(
        input_ids=row.input_ids[None],
        position_ids=row.position_ids[None],
        attention_mask=None,
        packed_seq_params=packed_parameters(row, torch.device("cpu")),
    )
    module.post_process = True
    tied = module.share_embeddings_and_output_weights
    weight = module.shared_embedding_or_output_weight() if tied else None
    logits, _ = module.output_layer(hidden, weight=weight)
    return gather_from_tensor_model_parallel_region(logits)[:, 0]


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_logits_equal_transformers(model_dir, tensor):
    batch = random_batch()

    def work():
        with policy_on(model_dir, Layout(tensor=tensor)) as policy, torch.no_grad():
            (row,) = plan_for(policy, batch, row_tokens=512)[0].micro_batches[0]
            return _dense_logits(policy, row)[:, :VOCAB]

    got = run_on_ranks(work, tensor)[0]
    model = _reference(model_dir)
    with torch.no_grad():
        want = torch.cat([model(s[None, :-1]).logits[0] for s in _sequences(batch)])
    assert (got - want).abs().max() < 2e-5


def test_statistics_loss_and_gradients_equal_transformers(model_dir):
    batch = random_batch()

    def work():
        with policy_on(model_dir, Layout(tensor=2), temperature=TEMPERATURE) as policy:
            plan = plan_for(policy, batch)
            inputs, _, old = prepared(policy, batch, plan, dynamo=False)
            policy.accumulate_gradients(plan[0], inputs)
            gradients = hf_gradients(policy)
            (update,) = policy.update(plan, inputs)
            return old.stats, gradients, update

    stats, gradients, update = run_on_ranks(work, 2)[0]
    model = _reference(model_dir)
    logp, entropy = [], []
    for sequence, prompt in zip(_sequences(batch), batch.prompt_lengths.tolist(), strict=True):
        scores = (model(sequence[None]).logits[0] / TEMPERATURE).log_softmax(-1)[prompt - 1 : -1]
        logp.append(scores.gather(1, sequence[prompt:, None])[:, 0])
        entropy.append(-(scores.exp() * scores).sum(-1))
    logp, entropy = torch.cat(logp), torch.cat(entropy)
    torch.testing.assert_close(stats.logp, logp.detach(), rtol=0, atol=2e-5)
    torch.testing.assert_close(stats.entropy, entropy.detach(), rtol=0, atol=2e-5)
    loss = -(batch.advantages * (logp - logp.detach()).exp()).mean()
    loss.backward()
    want = {n: p.grad for n, p in model.named_parameters()}
    assert update.loss == pytest.approx(loss.item(), rel=1e-4)
    assert relative_distance(gradients, want) < 1e-4
    norm = torch.stack([g.norm() for g in want.values()]).norm().item()
    assert update.grad_norm == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize(
    "layout",
    [Layout(), Layout(tensor=4), Layout(pipeline=2), Layout(tensor=2, pipeline=2)],
    ids=["tp1", "tp4", "pp2", "tp2xpp2"],
)
def test_export_after_no_update_is_bitwise_the_import(model_dir, layout):
    def work():
        with policy_on(model_dir, layout) as policy:
            return hf_weights(policy)

    with SafetensorsReader(model_dir) as reader:
        want = {name: reader.tensor(name) for name in reader.names()}
    for exported in run_on_ranks(work, layout.world_size):
        assert exported.keys() == want.keys()
        assert all(torch.equal(exported[name], want[name]) for name in want)


def test_shipped_policy_is_imported_bitwise():
    def work():
        with policy_on(TINY_POLICY, Layout(tensor=2, pipeline=2)) as policy:
            return hf_weights(policy)

    exported = run_on_ranks(work, 4)[0]
    with SafetensorsReader(TINY_POLICY) as reader:
        assert all(torch.equal(exported[name], reader.tensor(name)) for name in reader.names())


def test_padded_vocabulary_rows_stay_zero_and_get_no_gradient(model_dir):
    batch = random_batch()

    def work():
        # 128 rows a rank: with 101 entries ranks 1 to 3 hold padding only
        with policy_on(model_dir, Layout(tensor=4), vocab_multiple=128) as policy:
            plan = plan_for(policy, batch)
            inputs, _, _ = prepared(policy, batch, plan, dynamo=True)
            policy.accumulate_gradients(plan[0], inputs)
            start = 128 * policy.topology.tensor_rank
            padding = slice(max(VOCAB - start, 0), None)
            tables = [policy.module.embedding.word_embeddings.weight]
            if not policy.module.share_embeddings_and_output_weights:
                tables.append(policy.module.output_layer.weight)
            gradient = max(float(t.main_grad[padding].abs().max()) for t in tables)
            policy.update(plan, inputs)
            return gradient, max(float(t.detach()[padding].abs().max()) for t in tables)

    assert run_on_ranks(work, 4) == [(0.0, 0.0)] * 4


class TestBadModels:
    def test_wrong_shapes_are_refused_by_name(self, tmp_path):
        folder = write_qwen3(tmp_path / "a")
        config = (folder / "config.json").read_text()
        (folder / "config.json").write_text(
            config.replace('"intermediate_size": 48', '"intermediate_size": 64')
        )
        _refused(folder, WeightsError, r"mlp\.gate_proj\.weight.*\(48, 32\)")

    def test_vocabulary_of_another_size_is_refused(self, tmp_path):
        folder = write_qwen3(tmp_path / "a")
        config = (folder / "config.json").read_text()
        (folder / "config.json").write_text(
            config.replace('"vocab_size": 101', '"vocab_size": 103')
        )
        _refused(folder, WeightsError, r"model\.embed_tokens\.weight.*vocabulary 103")

    def test_truncated_weights_are_refused(self, tmp_path):
        folder = write_qwen3(tmp_path / "a")
        weights = folder / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:-100])
        _refused(folder, WeightsError, "truncated or damaged")

    def test_leftover_layers_are_refused(self, tmp_path):
        folder = write_qwen3(tmp_path / "a")
        config = (folder / "config.json").read_text()
        (folder / "config.json").write_text(
            config.replace('"num_hidden_layers": 4', '"num_hidden_layers": 3')
        )
        _refused(folder, WeightsError, r"without a parameter: \['model\.layers\.3\.")

    def test_another_family_is_refused(self, tmp_path):
        folder = write_qwen3(tmp_path / "a")
        config = (folder / "config.json").read_text()
        (folder / "config.json").write_text(config.replace('"qwen3"', '"mamba"'))
        with pytest.raises(ArchitectureError, match="mamba"):
            read_architecture(folder)

    def test_missing_shard_is_named(self, tmp_path):
        folder = write_qwen3(tmp_path / "a")
        (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
        (folder / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "model-00001-of-00002.safetensors",'
            ' "b": "model-00002-of-00002.safetensors"}}'
        )
        with pytest.raises(WeightsError, match="model-00002-of-00002"):
            SafetensorsReader(folder)


def _refused(folder, error, match):
    def work():
        with policy_on(folder, Layout()):
            pass

    with pytest.raises(AssertionError, match=match) as caught:
        run_on_ranks(work, 1)
    assert error.__name__ in str(caught.value)
