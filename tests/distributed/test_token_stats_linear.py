"""The fused LM head equals the head in float64 followed by the dense statistics."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from dynamo_megatron.kernels import fused_head_pays, token_stats, token_stats_linear
from tests.ranks import run_on_ranks
from tests.unit.kernels.problems import CollectiveCounter, LargestTensor, Problem, dense_stats

D, WIDTH, ROWS = 16, 60, 32


def _problem(ranks):
    """Hidden rows, a padded weight and the dense problem of the rows that count."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(ROWS, D, generator=generator)
    weight = torch.randn(ranks * WIDTH, D, generator=generator)
    rows = torch.randperm(ROWS, generator=generator)[:21].sort().values
    vocab_size = ranks * WIDTH - 7
    targets = torch.randint(0, vocab_size, (rows.numel(),), generator=generator)
    targets[3] = -1
    g = torch.randn(rows.numel(), generator=generator)
    k = torch.randn(rows.numel(), generator=generator)
    logits = hidden[rows].double() @ weight.double().t()
    return hidden, weight, rows, Problem(logits, targets, vocab_size, g, k)


def _check_linear(sequence_parallel, with_main_grad):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    hidden, weight, rows, dense = _problem(ranks)
    want, grad_logits = dense_stats(dense, 0.8)
    grad_hidden = torch.zeros(ROWS, D, dtype=torch.float64)
    grad_hidden[rows] = grad_logits @ weight.double()
    grad_weight = grad_logits.t() @ hidden[rows].double()

    mine = slice(rank * WIDTH, (rank + 1) * WIDTH)
    part = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
    given = (hidden[part] if sequence_parallel else hidden).clone().requires_grad_()
    shard = weight[mine].clone().requires_grad_()
    if with_main_grad:
        shard.main_grad = torch.ones(WIDTH, D)  # what earlier micro-batches left there
    with CollectiveCounter() as forward:
        got = token_stats_linear(
            given,
            shard,
            dense.targets,
            temperature=0.8,
            vocab_size=dense.vocab_size,
            group=dist.group.WORLD,
            rows_T=rows,
            sequence_parallel=sequence_parallel,
            token_chunk=8,
        )
    with CollectiveCounter() as backward:
        (got.logp * dense.g + got.entropy * dense.k).sum().backward()

    for name in ("logp", "entropy", "lam", "sum_pi2", "q"):
        torch.testing.assert_close(
            getattr(got, name).double(), want[name], rtol=0, atol=1e-5, msg=name
        )
    wanted = grad_hidden[part] if sequence_parallel else grad_hidden
    torch.testing.assert_close(given.grad.double(), wanted, rtol=0, atol=1e-5)
    sums = shard.main_grad - 1.0 if with_main_grad else shard.grad
    torch.testing.assert_close(sums.double(), grad_weight[mine], rtol=0, atol=1e-5)
    assert not with_main_grad or not shard.grad.any()
    if ranks > 1:
        gather = ["_allgather_base_"]
        assert forward.calls == (gather * 2 if sequence_parallel else gather)
        assert backward.calls == (
            [*gather, "_reduce_scatter_base_"] if sequence_parallel else ["allreduce_"]
        )


@pytest.mark.parametrize("with_main_grad", [False, True])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_fused_head_equals_dense_head_in_values_gradients_and_collectives(
    ranks, sequence_parallel, with_main_grad
):
    run_on_ranks(_check_linear, ranks, sequence_parallel, with_main_grad)


def _check_equal_to_logits_variant(dtype):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    hidden, weight, _, dense = _problem(ranks)
    dense = replace(dense, targets=torch.arange(ROWS) % dense.vocab_size)
    mine = weight[rank * WIDTH : (rank + 1) * WIDTH].to(dtype).requires_grad_()
    settings = {
        "temperature": torch.linspace(0.5, 1.5, ROWS),
        "vocab_size": dense.vocab_size,
        "group": dist.group.WORLD,
    }
    hidden = hidden.to(dtype)
    fused = token_stats_linear(hidden, mine, dense.targets, token_chunk=5, **settings)
    plain = token_stats(hidden @ mine.t(), dense.targets, **settings)
    for name in ("logp", "entropy", "lam", "sum_pi2", "q"):
        torch.testing.assert_close(getattr(fused, name), getattr(plain, name), rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_head_equals_the_head_followed_by_token_stats(dtype):
    run_on_ranks(_check_equal_to_logits_variant, 2, dtype)


def _check_no_tokens_and_empty_shards(sequence_parallel):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    hidden = torch.ones(4 // ranks if sequence_parallel else 4, 3, requires_grad=True)
    weight = torch.ones(10, 3, requires_grad=True)  # rank 1 holds no id
    for rows in (torch.zeros(0, dtype=torch.int64), torch.tensor([1, 3])):
        got = token_stats_linear(
            hidden,
            weight,
            torch.zeros(rows.numel(), dtype=torch.int64),
            vocab_size=10,
            group=dist.group.WORLD,
            rows_T=rows,
            sequence_parallel=sequence_parallel,
        )
        got.logp.sum().backward()
    torch.testing.assert_close(got.entropy.detach(), torch.tensor([10.0, 10.0]).log())
    # Equal columns: the hidden gradients cancel, those of the weight are x (1{0} - pi).
    torch.testing.assert_close(hidden.grad, torch.zeros_like(hidden), rtol=0, atol=1e-6)
    want = torch.full((10, 3), -0.2)
    want[0] += 2.0
    torch.testing.assert_close(weight.grad, want if rank == 0 else torch.zeros(10, 3))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_no_tokens_and_ranks_without_ids_take_part(sequence_parallel):
    run_on_ranks(_check_no_tokens_and_empty_shards, 2, sequence_parallel)


def test_the_fused_head_is_preferred_exactly_where_the_logits_exceed_the_budget():
    # bfloat16, 32768 tokens: 19072 columns (tp 8) are 1.2 GB, 76032 (tp 2) 5.0 GB, against 2 GiB.
    assert not fused_head_pays(32768, 19072, 2)
    assert fused_head_pays(32768, 76032, 2)
    assert not fused_head_pays(10, 10, 2, budget_bytes=200)
    assert fused_head_pays(10, 10, 2, budget_bytes=199)


def test_no_more_logits_exist_at_once_than_those_of_a_chunk():
    hidden = torch.randn(64, D, requires_grad=True)
    weight = torch.randn(300, D, requires_grad=True)
    with LargestTensor() as seen:
        got = token_stats_linear(hidden, weight, torch.arange(64), vocab_size=300, token_chunk=20)
        got.logp.sum().backward()
    # Two float32 scratch blocks of a chunk, or the weight's gradient; all logits would be 19200.
    assert seen.numel == max(2 * 20 * 300, 300 * D)


def test_only_what_needs_a_gradient_gets_one():
    hidden = torch.randn(5, D)
    weight = torch.randn(30, D, requires_grad=True)
    targets = torch.arange(5)
    token_stats_linear(hidden, weight, targets, vocab_size=30).logp.sum().backward()
    frozen = hidden.clone().requires_grad_()
    token_stats_linear(frozen, weight.detach(), targets, vocab_size=30).logp.sum().backward()
    assert hidden.grad is None
    z = hidden @ weight.detach().t()
    grad_z = torch.nn.functional.one_hot(targets, 30) - z.softmax(-1)
    torch.testing.assert_close(weight.grad, grad_z.t() @ hidden)
    torch.testing.assert_close(frozen.grad, grad_z @ weight.detach())
    with torch.no_grad():
        assert token_stats_linear(hidden, weight, targets, vocab_size=30).logp.grad_fn is None


def test_megatrons_hook_adds_a_tied_embeddings_gradient_once_and_ours_once():
    # The hook of Megatron's DistributedDataParallel: add .grad to main_grad, then drop it. Ours is
    # in main_grad already; autograd hands over the embedding's, whichever way the flag stands.
    embedding = torch.randn(12, D, requires_grad=True)
    tokens, targets = torch.tensor([3, 7, 3]), torch.tensor([7, 3, 1])

    def loss():
        stats = token_stats_linear(embedding[tokens], embedding, targets, vocab_size=12)
        return stats.logp.sum()

    (want,) = torch.autograd.grad(loss(), embedding)
    embedding.main_grad = torch.zeros(12, D)
    embedding.grad_added_to_main_grad = False
    for _ in range(2):  # two micro-batches
        loss().backward()
        if not embedding.grad_added_to_main_grad:
            embedding.main_grad.add_(embedding.grad)
        embedding.grad = None
    torch.testing.assert_close(embedding.main_grad, 2 * want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_Vpd": torch.zeros(9, 5)}, "does not fit weight \\[9, 5\\]"),
        ({"weight_Vpd": torch.zeros(9, 4).bfloat16()}, "same d and dtype"),
        ({"hidden_Sd": torch.zeros(4, 3).t()}, "hidden .* has strides"),
        ({"targets_T": torch.tensor([0, 1])}, "targets must be \\[3\\] int64"),
        ({"token_chunk": 0}, "token_chunk must be at least 1, got 0"),
        ({"impl": "reference"}, "impl='reference' is not available"),
    ],
)
def test_bad_input_is_refused_with_its_values(change, message):
    arguments = {
        "hidden_Sd": torch.zeros(3, 4),
        "weight_Vpd": torch.zeros(9, 4),
        "targets_T": torch.tensor([0, 1, 2]),
        "vocab_size": 9,
    }
    with pytest.raises(ValueError, match=message):
        token_stats_linear(**(arguments | change))


class _TiedHead(torch.nn.Module):
    """An embedding, and a head that may share its weight, behind Megatron's gradient buffers."""

    def __init__(self, tied):
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.embedding = torch.nn.Parameter(torch.randn(12, D, generator=generator))
        self.head = self.embedding if tied else torch.nn.Parameter(self.embedding.detach() + 0.1)

    def forward(self, tokens, targets, fused):
        hidden = self.embedding[tokens]
        if fused:
            return token_stats_linear(hidden, self.head, targets, vocab_size=12).logp.sum()
        return token_stats(hidden @ self.head.t(), targets, vocab_size=12).logp.sum()


def _check_megatron_buffers(tied, zero_out_wgrad, overlap):
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel()
    module = _TiedHead(tied)
    want = _TiedHead(tied)
    if zero_out_wgrad:
        module.head.zero_out_wgrad = True
    model = DistributedDataParallel(
        TransformerConfig(num_layers=1, hidden_size=D, num_attention_heads=1, cuda_graph_scope=[]),
        DistributedDataParallelConfig(grad_reduce_in_fp32=True, overlap_grad_reduce=overlap),
        module,
    )
    model.zero_grad_buffer()
    rows = [torch.tensor([3, 7, 3]), torch.tensor([1, 2, 11])]
    for tokens, fused in zip(rows, (True, False), strict=True):  # a long row and a short one
        if fused:
            with model.no_sync():
                model(tokens, tokens.flip(0), fused).backward()
        else:
            model(tokens, tokens.flip(0), fused).backward()
        want(tokens, tokens.flip(0), False).backward()
    model.finish_grad_sync()
    torch.testing.assert_close(module.embedding.main_grad, want.embedding.grad)
    torch.testing.assert_close(module.head.main_grad, want.head.grad)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(("tied", "zero_out_wgrad"), [(False, False), (True, True), (True, False)])
def test_megatrons_gradient_buffers_hold_fused_plain_and_tied_gradients_together(
    tied, zero_out_wgrad, overlap
):
    run_on_ranks(_check_megatron_buffers, 1, tied, zero_out_wgrad, overlap)
