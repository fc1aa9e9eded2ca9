"""Problems and expected values for the token statistics, written apart from the code under test."""

from dataclasses import dataclass

import torch
import torch._dynamo  # dispatch modes import it: once here, not in every forked rank
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

IMPLEMENTATIONS = ["reference", "torch"]
FIELDS = ("logp", "entropy", "lam", "sum_pi2", "q")


@dataclass(frozen=True)
class Problem:
    """Logits over a padded vocabulary, with unequal upstream gradients g (logp) and k (entropy)."""

    logits: Tensor
    targets: Tensor
    vocab_size: int
    g: Tensor
    k: Tensor

    @property
    def tokens(self) -> int:
        return self.targets.numel()


def hostile_problem(*, ranks: int, dtype: torch.dtype, tokens: int = 24, width: int = 150):
    """Every trap at once: padding at +60, masked blocks, an all-masked shard, far-off tokens."""
    generator = torch.Generator().manual_seed(1)
    columns = ranks * width
    vocab_size = columns - 37
    logits = (torch.randn(tokens, columns, generator=generator) * 3).to(dtype)
    targets = torch.randint(0, vocab_size, (tokens,), generator=generator)
    logits[:, vocab_size:] = 60.0
    logits[1, 3 : vocab_size - 10] = -torch.inf
    targets[1] = vocab_size - 5
    if ranks > 1:
        logits[2, :width] = -torch.inf  # the whole first shard
        targets[2] = vocab_size - 1
    logits[3] -= 400.0
    logits[4, 7] += 80.0
    logits[5, :vocab_size] = 1.5  # uniform
    logits[6] += 3000.0
    logits[7, [4, 9]] = 40.0  # two equal peaks
    targets[8] = -100
    logits[9] = -150.0
    borders = (0, vocab_size - 1, min(width, vocab_size - 1), min(width, vocab_size) - 1)
    targets[[10, 11, 0, 5]] = torch.tensor(borders)
    g = torch.randn(tokens, generator=generator)
    k = torch.randn(tokens, generator=generator)
    return Problem(logits, targets, vocab_size, g, k)


def dense_stats(problem: Problem, temperature) -> tuple[dict[str, Tensor], Tensor]:
    """Float64 statistics by their definition, and the gradient by its formula.

    The gradient of sum(g logp + k H) is ((g 1{y} - pi g) - k pi (log pi + H)) / temperature.
    """
    tau = torch.as_tensor(temperature, dtype=torch.float64).expand(problem.tokens)[:, None]
    z = problem.logits[:, : problem.vocab_size].double() / tau
    log_pi = z - torch.logsumexp(z, dim=-1, keepdim=True)
    pi = log_pi.exp()
    log_pi_or_0 = torch.where(pi > 0, log_pi, 0.0)
    entropy = -(pi * log_pi_or_0).sum(-1)
    centred = log_pi_or_0 + entropy[:, None]
    y = problem.targets.clamp(min=0)
    logp = log_pi.gather(1, y[:, None])[:, 0]
    keep = (problem.targets >= 0).double()
    stats = {
        "logp": logp * keep,
        "entropy": entropy,
        "lam": (logp + entropy) * keep,
        "sum_pi2": pi.square().sum(-1),
        "q": (pi.square() * centred).sum(-1),
        "q_scale": (pi.square() * centred.abs()).sum(-1),
    }
    g, k = problem.g.double()[:, None], problem.k.double()[:, None]
    one_hot = torch.nn.functional.one_hot(y, problem.vocab_size).double()
    grad = torch.zeros(problem.logits.shape, dtype=torch.float64)
    grad[:, : problem.vocab_size] = (g * (one_hot - pi) - k * pi * centred) / tau * keep[:, None]
    return stats, grad


def ulp(value: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Distance between neighbouring numbers of ``dtype`` at ``value``."""
    exponent = torch.frexp(value.abs().double().clamp(min=1e-30)).exponent - 1
    return torch.finfo(dtype).eps * torch.exp2(exponent.double())


class CollectiveCounter(TorchDispatchMode):
    """Counts the collectives issued while it is active, and the bytes this rank hands in."""

    def __init__(self):
        super().__init__()
        self.calls: list[str] = []
        self.bytes_sent = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "c10d":
            self.calls.append(func.overloadpacket._qualified_op_name.split("::")[1])
            given = args[1] if self.calls[-1] == "_allgather_base_" else args[0]
            given = [given] if isinstance(given, Tensor) else given
            self.bytes_sent += sum(t.numel() * t.element_size() for t in given)
        return func(*args, **(kwargs or {}))


class LargestTensor(TorchDispatchMode):
    """Records the size of the largest tensor any operation makes, and the collectives."""

    def __init__(self):
        super().__init__()
        self.numel, self.collectives = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_iter(result) if isinstance(t, Tensor)]
        self.numel = max([self.numel, *sizes])
        self.collectives += func.namespace == "c10d"
        return result
