"""Models that nothing was tuned for, as people write them: what the choice of the loop or batching is tried on.

In: `python -m benchmarks.odd_models [--rounds 100] [name...]`. Out: one row per model and mode, CPU time over the plain
loop's, minibatch by minibatch on new data: as chosen (adaptive=True), and as batching always would be.

    python -m benchmarks.odd_models --rounds 40 hypernetwork
"""

from __future__ import annotations

import argparse
import random
import statistics
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.ordinary_models import D, Row, floats, sentences, vectors
from benchmarks.tasks.never_slower import FIRST, seconds
from fxbatch.runtime.strategy import AdaptiveSwitch


class StatefulRecurrence(nn.Module):
    """A GRU cell over the rows of `[T, D]`, with a Python count of the words that were long."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.GRUCell(D, D), nn.Linear(D, 2)

    def forward(self, x: Tensor, long: list[bool]) -> Tensor:
        h, seen = torch.zeros(D), 0
        for row, is_long in zip(x, long, strict=True):
            seen += is_long
            h = self.cell(row, h) if not is_long else h * (1.0 / (1 + seen))
        return self.out(h)


class SmallTree(nn.Module):
    """A tree network of four units: a tree is a float vector, or a pair of trees."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.new, self.out = nn.Linear(8, 4), nn.Linear(8, 4), nn.Linear(4, 2)

    def encode(self, tree: Any) -> Tensor:
        if isinstance(tree, Tensor):
            return tree
        pair = torch.cat([self.encode(child) for child in tree])
        gate = torch.sigmoid(self.gates(pair))
        return gate * torch.tanh(self.new(pair)) + (1 - gate) * pair[:4]

    def forward(self, tree: Any) -> Tensor:
        return self.out(self.encode(tree))


class DeepSets(nn.Module):
    """A set of vectors, as a list: the sum of their features."""

    def __init__(self) -> None:
        super().__init__()
        self.phi = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D))
        self.rho = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, 2))

    def forward(self, items: list[Tensor]) -> Tensor:
        return self.rho(torch.stack([self.phi(x) for x in items]).sum(0))


class Hypernetwork(nn.Module):
    """The weights of a layer are made from the instance."""

    def __init__(self) -> None:
        super().__init__()
        self.weights, self.bias, self.out = nn.Linear(8, D * D), nn.Linear(8, D), nn.Linear(D, 2)

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        w = self.weights(task).view(D, D)
        return self.out(torch.tanh(w @ x + self.bias(task)))


class DenseMixture(nn.Module):
    """Four experts, all of them weighted by a gate: `[D]` -> `[2]`."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, 4)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(4))
        self.out = nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        shares = torch.softmax(self.gate(x), -1)
        return self.out(sum(s * torch.relu(e(x)) for s, e in zip(shares, self.experts, strict=True)))  # type: ignore[arg-type]


class EinsumAttention(nn.Module):
    """Attention of four heads by einsum over `[T, D]`."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.out = nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).view(len(x), 4, D // 4) for f in (self.q, self.k, self.v))
        shares = torch.einsum("ihd,jhd->hij", q, k).softmax(-1)
        return self.out(torch.einsum("hij,jhd->ihd", shares, v).reshape(len(x), D).mean(0))


class GreedyDecoder(nn.Module):
    """A GRU that says a word after the other until it says word 0, twelve at most."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.words = nn.Embedding(20, D), nn.GRUCell(D, D), nn.Linear(D, 20)

    def forward(self, h: Tensor) -> Tensor:
        word, score = torch.tensor(1), torch.zeros(())
        for _ in range(12):
            h = self.cell(self.embed(word), h)
            scores = torch.log_softmax(self.words(h), -1)
            word = scores.argmax()
            score = score + scores[word]
            if word == 0:
                break
        return score


class Fields(nn.Module):
    """A record of named tensors, some of them absent."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({name: nn.Linear(8, D) for name in "abcd"})
        self.out = nn.Linear(D, 2)

    def forward(self, record: dict[str, Tensor]) -> Tensor:
        h = torch.zeros(D)
        for name, value in record.items():
            h = h + torch.relu(self.parts[name](value))
        return self.out(h)


class Newton(nn.Module):
    """A numeric loop with `.item()`: Newton's method for a root, until it is near."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, a: Tensor) -> Tensor:
        x = a.abs() + 1.0
        for _ in range(8):
            step = (x * x - a.abs() * self.scale) / (2 * x)
            x = x - step
            if abs(step.item()) < 1e-3:
                break
        return x


class Tiny(nn.Module):
    """One layer: `[4]` -> `[2]`."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x)


class Perceptron(nn.Module):
    """Three layers: `[D]` -> `[2]`."""

    def __init__(self, width: int = D) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(D, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 2)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class LargeProducts(nn.Module):
    """Products so large that batching them gives nothing: `[64, 256]` -> `[2]`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(256, 512), nn.Linear(512, 256), nn.Linear(256, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.second(torch.relu(self.first(x)))).mean(0))


class Siamese(nn.Module):
    """The distance of two sentences `[T, D]`, encoded by one network."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(D, D), nn.Tanh(), nn.Linear(D, D))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return F.cosine_similarity(self.encode(a).mean(0), self.encode(b).mean(0), dim=0)


class Tagger(nn.Module):
    """An LSTM cell over the words of `[T, D]`, and a loss a word."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.LSTMCell(D, 64), nn.Linear(64, 6)

    def forward(self, x: Tensor, tags: Tensor) -> Tensor:
        h = c = torch.zeros(64)
        losses = []
        for row, tag in zip(x, tags, strict=True):
            h, c = self.cell(row, (h, c))
            losses.append(F.cross_entropy(self.out(h), tag))
        return torch.stack(losses).mean()


class Spline(nn.Module):
    """Pointwise arithmetic with Python numbers of the instance's own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(D)), nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor, at: float, power: int) -> Tensor:
        y = x * at + self.a
        for _ in range(power):
            y = y * torch.sigmoid(y + self.b * at)
        return (y / (1.0 + at)).sum()


class Chains(nn.Module):
    """A random walk over a table: rows chosen by Python numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.step = nn.Embedding(100, D), nn.Linear(2 * D, D)

    def forward(self, walk: list[int]) -> Tensor:
        h = self.table.weight[walk[0]]
        for at in walk[1:]:
            h = torch.tanh(self.step(torch.cat([h, self.table.weight[at]])))
        return h.sum()


class Sampler(nn.Module):
    """Draws from what it predicts, six times: random numbers and waits."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.words = nn.GRUCell(D, D), nn.Linear(D, 8)

    def forward(self, h: Tensor) -> Tensor:
        total = torch.zeros(())
        for _ in range(6):
            logs = torch.log_softmax(self.words(h), -1)
            k = int(torch.multinomial(logs.exp(), 1))
            total = total + logs[k]
            h = self.cell(h * (k + 1) / 8.0, h)
        return total


class Pictures(nn.Module):
    """A convolution, a norm and a pooled layer over pictures of one size `[3, 16, 16]`."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.norm(self.conv(x[None]))).mean((2, 3))[0])


def walk_tree(rng: random.Random, leaves: int) -> Any:
    if leaves == 1:
        return floats(4)
    left = rng.randint(1, leaves - 1)
    return walk_tree(rng, left), walk_tree(rng, leaves - left)


def labelled(low: int, high: int) -> Any:
    def draw(rng: random.Random, n: int) -> tuple[list[Any], ...]:
        lengths = [rng.randint(low, high) for _ in range(n)]
        return [floats(t, D) for t in lengths], [torch.randint(0, 6, (t,)) for t in lengths]

    return draw


def marked(rng: random.Random, n: int) -> tuple[list[Any], ...]:
    lengths = [rng.randint(3, 12) for _ in range(n)]
    return [floats(t, D) for t in lengths], [[rng.random() < 0.2 for _ in range(t)] for t in lengths]


def trees(rng: random.Random, n: int) -> tuple[list[Any], ...]:
    return ([walk_tree(rng, rng.randint(3, 10)) for _ in range(n)],)


def pairs(rng: random.Random, n: int) -> tuple[list[Any], ...]:
    return tuple([floats(rng.randint(4, 20), D) for _ in range(n)] for _ in range(2))


def splines(rng: random.Random, n: int) -> tuple[list[Any], ...]:
    return (
        list(floats(n, D)),
        [rng.uniform(0.1, 2.0) for _ in range(n)],
        [rng.randint(1, 4) for _ in range(n)],
    )


def records(rng: random.Random, n: int) -> tuple[list[Any], ...]:
    return ([{k: floats(8) for k in "abcd" if rng.random() < 0.7} for _ in range(n)],)


def walks(rng: random.Random, n: int) -> tuple[list[Any], ...]:
    return ([rng.choices(range(100), k=rng.randint(3, 9)) for _ in range(n)],)


ROWS: dict[str, Row] = {
    row.name: row
    for row in (
        Row("recurrence with Python state", StatefulRecurrence, marked),
        Row("tree network, 4 units", SmallTree, trees),
        Row("tree network, 4 units, 2 trees", SmallTree, trees, 2),
        Row("deep sets", DeepSets, lambda rng, n: ([list(floats(rng.randint(2, 9), D)) for _ in range(n)],)),
        Row("hypernetwork", Hypernetwork, lambda rng, n: (list(floats(n, D)), list(floats(n, 8)))),
        Row("dense mixture", DenseMixture, vectors),
        Row("einsum attention", EinsumAttention, sentences(5, 30)),
        Row("greedy GRU decoder", GreedyDecoder, vectors),
        Row("dict of fields", Fields, records),
        Row("Newton, .item()", Newton, lambda rng, n: (list(floats(n)),)),
        Row("one layer", Tiny, lambda rng, n: (list(floats(n, 4)),)),
        Row("one layer, 1 instance", Tiny, lambda rng, n: (list(floats(n, 4)),), 1),
        Row("perceptron", Perceptron, vectors),
        Row("perceptron, 3 instances", Perceptron, vectors, 3),
        Row("wide perceptron", lambda: Perceptron(1024), vectors),
        Row("large products", LargeProducts, lambda rng, n: (list(floats(n, 64, 256)),), 16),
        Row("siamese sentences", Siamese, pairs),
        Row("tagger, 1 sentence", Tagger, labelled(8, 25), 1),
        Row("tagger, 8 sentences", Tagger, labelled(8, 25), 8),
        Row("Python numbers", Spline, splines),
        Row("walks by index", Chains, walks),
        Row("sampler", Sampler, vectors),
        Row("pictures of one size", Pictures, lambda rng, n: (list(floats(n, 3, 16, 16)),)),
    )
}  # fmt: skip


def beside(row: Row, rounds: int, *, grad: bool, batch: bool = True) -> dict[str, Any]:
    """Times of a row over the loop's: as chosen, and batched always; what was chosen in how many minibatches."""
    models = [row.model() for _ in range(3)]
    chosen, always = row.decorate(models[0]), row.decorate(models[1], adaptive=False)
    alone = row.alone(models[2])
    loop = lambda *columns: torch.stack([alone(*one) for one in zip(*columns, strict=True)])  # noqa: E731
    runs = [(chosen, models[0]), (always, models[1]), (loop, models[2])]
    found: list[list[float]] = [[], [], []]
    before, AdaptiveSwitch.on = AdaptiveSwitch.on, True
    try:
        for round in range(rounds):
            instances = row.batch(round)
            for k in random.Random(round).sample(range(3), 3):
                if k != 1 or batch:
                    found[k].append(seconds(*runs[k], instances, grad=grad))
        strategy = chosen.__fxbatch__.engine(models[0]).strategy  # type: ignore[attr-defined]
    finally:
        AdaptiveSwitch.on = before
    ours, other, theirs = found
    late = min(FIRST, rounds // 2)
    ratio = lambda xs: statistics.median(a / b for a, b in zip(xs[late:], theirs[late:], strict=True))  # noqa: E731
    return {
        "loop": statistics.median(theirs) * 1e3,
        "first": ours[0] / statistics.median(theirs),
        "median": ratio(ours),
        "after": sum(ours[late:]) / sum(theirs[late:]),
        "all": sum(ours) / sum(theirs),
        "always": ratio(other) if batch else float("nan"),
        "loops": strategy.looped(grad=grad),
        "says": strategy.describe(row.instances, grad=grad),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="rows, by parts of their names (default: all)")
    parser.add_argument("--rounds", type=int, default=100, help="minibatches of each (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (default: %(default)s)")
    parser.add_argument("--chosen-only", action="store_true", help="leave out adaptive=False")
    parser.add_argument("--says", action="store_true", help="what the strategy says of each, too")
    parser.add_argument("--mode", choices=("training", "inference"), help="only this (default: both)")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{'':42} loop ms  first median after in all always | loops")
    for name, row in ROWS.items():
        if options.names and not any(part in name for part in options.names):
            continue
        for grad in (True, False):
            mode = "training" if grad else "inference"
            if options.mode in (None, mode):
                r = beside(row, options.rounds, grad=grad, batch=not options.chosen_only)
                print(
                    f"{name + ', ' + mode:42} {r['loop']:7.2f} {r['first']:6.1f} {r['median']:6.2f} {r['after']:5.2f}"
                    f" {r['all']:6.2f} {r['always']:6.2f} | {r['loops']:5}", flush=True
                )  # fmt: skip
                if options.says:
                    print("    " + r["says"])


if __name__ == "__main__":
    main()
