"""Ordinary per-instance models, as people write them, most of which gain little or nothing by batching.

In: a Row by name. Out: a model with a plain forward of one instance, and minibatches of new data each round.

    row = ROWS["attention"]
    model, batch = row.model(), row.batch(0, 32)          # 32 instances, round 0
    row.decorate(model)(*batch)                            # the decorated forward
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxbatch
from benchmarks.models import TreeLSTM, random_trees

D = 32  # the width of most of them


class ScatterNetwork(nn.Module):
    """Three rounds of messages over the edges of one graph: `[N, D]`, `[E]`, `[E]` -> `[2]`."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.ModuleList(nn.Linear(D, D) for _ in range(3))
        self.update = nn.ModuleList(nn.Linear(2 * D, D) for _ in range(3))
        self.out = nn.Linear(D, 2)

    def forward(self, x: Tensor, source: Tensor, target: Tensor) -> Tensor:
        for message, update in zip(self.message, self.update, strict=True):
            sent = torch.relu(message(x[source]))
            received = torch.zeros_like(x).index_add(0, target, sent)
            x = torch.relu(update(torch.cat([x, received], -1)))
        return self.out(x.mean(0))


class MessagePassing(nn.Module):
    """An MPNN with edge features and a GRU cell: `[N, D]`, `edge_index [2, E]`, `[E, 8]` -> `[2]`."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Sequential(nn.Linear(2 * D + 8, D), nn.ReLU(), nn.Linear(D, D))
        self.update = nn.GRUCell(D, D)
        self.out = nn.Linear(D, 2)

    def forward(self, x: Tensor, edge_index: Tensor, edges: Tensor) -> Tensor:
        source, target = edge_index
        for _ in range(3):
            sent = self.message(torch.cat([x[source], x[target], edges], -1))
            x = self.update(torch.zeros_like(x).index_add(0, target, sent), x)
        return self.out(x.sum(0))


class Attention(nn.Module):
    """Self-attention over a sentence `[T, D]`."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(D, D), nn.Linear(D, D), nn.Linear(D, D)
        self.out = nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        weights = torch.softmax(self.q(x) @ self.k(x).T / D**0.5, -1)
        return self.out((weights @ self.v(x)).mean(0))


class BagOfWords(nn.Module):
    """Embedding, MLP, mean over the words `[T]`."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(1000, D)
        self.mlp = nn.Sequential(nn.Linear(D, D), nn.ReLU(), nn.Linear(D, D))
        self.out = nn.Linear(D, 2)

    def forward(self, words: Tensor) -> Tensor:
        return self.out(self.mlp(self.embed(words)).mean(0))


class Convolution1d(nn.Module):
    """Two convolutions and a maximum over a signal `[4, T]`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(4, 16, 3, padding=1), nn.Conv1d(16, D, 3, padding=1)
        self.out = nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.second(torch.relu(self.first(x)))).amax(-1))


class Convolution2d(nn.Module):
    """Two convolutions and a mean over a picture `[3, H, W]`."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2)
        self.out = nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.second(torch.relu(self.first(x)))).mean((1, 2)))


class MaskedExperts(nn.Module):
    """A mixture of four experts, each for the rows of `[T, D]` that a mask gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(D, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(D, D), nn.ReLU()) for _ in range(4))
        self.out = nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).argmax(-1)
        y = torch.zeros_like(x)
        for e, expert in enumerate(self.experts):
            mask = chosen == e
            if mask.any():
                y = y.index_put((mask,), expert(x[mask]))
        return self.out(y.mean(0))


class ConditionalField(nn.Module):
    """A CRF over `[T, D]`: the score of the tags `[T]` less the log of the sum over all paths."""

    def __init__(self) -> None:
        super().__init__()
        self.emit = nn.Linear(D, 6)
        self.transitions = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor, tags: Tensor) -> Tensor:
        em = self.emit(x)
        a, score = em[0], em[0][tags[0]]
        for i in range(1, len(x)):
            a = torch.logsumexp(a[:, None] + self.transitions, 0) + em[i]
            score = score + em[i][tags[i]] + self.transitions[tags[i - 1], tags[i]]
        return torch.logsumexp(a, 0) - score


class Viterbi(nn.Module):
    """The score of the best path of a CRF, and its last tag."""

    def __init__(self) -> None:
        super().__init__()
        self.emit = nn.Linear(D, 6)
        self.transitions = nn.Parameter(torch.randn(6, 6))

    def forward(self, x: Tensor) -> Tensor:
        em = self.emit(x)
        v = em[0]
        for i in range(1, len(x)):
            v = (v[:, None] + self.transitions).max(0).values + em[i]
        return v[int(v.argmax())]


class BeamSearch(nn.Module):
    """Beam search of width 3 with a GRU cell, eight words: the best score."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.embed, self.out = nn.GRUCell(D, D), nn.Embedding(50, D), nn.Linear(D, 50)

    def forward(self, x: Tensor) -> Tensor:
        beams = [(x.new_zeros(()), x, self.embed.weight[0])]
        for _ in range(8):
            grown = []
            for score, h, word in beams:
                h = self.cell(word, h)
                best = torch.log_softmax(self.out(h), -1).topk(3)
                grown += [
                    (score + s, h, self.embed.weight[w])
                    for s, w in zip(best.values, best.indices.tolist(), strict=True)
                ]
            grown.sort(key=lambda b: -b[0].item())
            beams = grown[:3]
        return beams[0][0]


class AdaptiveTime(nn.Module):
    """Adaptive computation time: a cell is called until it says stop."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.halt, self.out = nn.GRUCell(D, D), nn.Linear(D, 1), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        h, total = torch.zeros_like(x), torch.zeros(1)
        for _ in range(12):
            h = self.cell(x, h)
            total = total + torch.sigmoid(self.halt(h))
            if total > 2.0:
                break
        return self.out(h)


class TreeDecoder(nn.Module):
    """Grows a tree from a vector: each node decides whether it has children."""

    def __init__(self) -> None:
        super().__init__()
        self.split, self.left, self.right = nn.Linear(D, 1), nn.Linear(D, D), nn.Linear(D, D)
        self.out = nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        leaves = []

        def grow(h: Tensor, depth: int) -> None:
            if depth < 5 and self.split(h) > -0.1:
                grow(torch.tanh(self.left(h)), depth + 1)
                grow(torch.tanh(self.right(h)), depth + 1)
            else:
                leaves.append(h)

        grow(x, 0)
        return self.out(sum(leaves[1:], leaves[0]))


class PointerNetwork(nn.Module):
    """Points at one row of `[6, D]` after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.query = nn.GRUCell(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        h, at, total = x.mean(0), 0, x.new_zeros(())
        for _ in range(6):
            h = self.cell(x[at], h)
            scores = torch.log_softmax(x @ self.query(h), 0)
            at = int(scores.argmax())
            total = total + scores[at]
        return total


class GreedyAutoencoder(nn.Module):
    """Merges the two neighbours that are best rebuilt until one vector is left (Socher et al. 2011)."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(2 * D, D), nn.Linear(D, 2 * D)

    def forward(self, words: list[Tensor]) -> Tensor:
        nodes, loss = list(words), words[0].new_zeros(())
        while len(nodes) > 1:
            pairs = [torch.cat([a, b]) for a, b in itertools.pairwise(nodes)]
            merged = [torch.tanh(self.encode(p)) for p in pairs]
            errors = [F.mse_loss(self.decode(m), p) for m, p in zip(merged, pairs, strict=True)]
            k = int(torch.stack(errors).argmin())
            nodes[k : k + 2] = [merged[k]]
            loss = loss + errors[k]
        return loss


class Frames(nn.Module):
    """A pooled projection of frames `[T, 40]`, T from 100 to 1500."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.out = nn.Linear(40, 64), nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.relu(self.hidden(x)).mean(0))


class AnnealedClamp(nn.Module):
    """A clamp whose bound is another float in each minibatch, and a slope that is another in each instance."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.out = nn.Linear(D, D), nn.Linear(D, 2)

    def forward(self, x: Tensor, bound: float, slope: float) -> Tensor:
        return self.out(F.leaky_relu(torch.clamp(self.first(x), -bound, bound), slope))


class Recurrent(nn.Module):
    """`nn.LSTM` over a sentence `[T, D]`."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(D, D), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.lstm(x)[0][-1])


class Encoder(nn.Module):
    """A Transformer layer over a sentence `[T, D]`."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(D, 4, 64, dropout=0.0, batch_first=True)
        self.out = nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.layer(x[None])[0].mean(0))


Draw = Callable[[random.Random, int], tuple[list[Any], ...]]


def floats(*shape: int) -> Tensor:
    return torch.randn(shape)


def graphs(rng: random.Random, n: int) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Nodes, edges `[2, E]` and E of n graphs."""
    for _ in range(n):
        nodes = rng.randint(5, 30)
        edges = rng.randint(nodes, 3 * nodes)
        yield floats(nodes, D), torch.randint(0, nodes, (2, edges)), edges


def scattered(rng: random.Random, n: int) -> tuple[list[Any], ...]:
    found = list(graphs(rng, n))
    return [x for x, _, _ in found], [e[0] for _, e, _ in found], [e[1] for _, e, _ in found]


def connected(rng: random.Random, n: int) -> tuple[list[Any], ...]:
    found = list(graphs(rng, n))
    return [x for x, _, _ in found], [e for _, e, _ in found], [floats(k, 8) for _, _, k in found]


def sentences(low: int, high: int, step: int = 1, width: int = D) -> Draw:
    return lambda rng, n: ([floats(rng.randrange(low, high, step), width) for _ in range(n)],)


def tagged(rng: random.Random, n: int) -> tuple[list[Any], ...]:
    lengths = [rng.randint(4, 15) for _ in range(n)]
    return [floats(t, D) for t in lengths], [torch.randint(0, 6, (t,)) for t in lengths]


def vectors(rng: random.Random, n: int) -> tuple[list[Any], ...]:
    return (list(floats(n, D)),)


def annealed(rng: random.Random, n: int) -> tuple[list[Any], ...]:
    bound = rng.uniform(0.5, 2.0)
    return list(floats(n, D)), [bound] * n, [rng.uniform(0.01, 0.3) for _ in range(n)]


@dataclass(frozen=True)
class Row:
    """One row of the table: a model, how its instances are drawn, how many a minibatch."""

    name: str
    kind: Callable[[], nn.Module]
    draw: Draw
    instances: int = 32

    def model(self, seed: int = 0) -> nn.Module:
        """The model, the same one each time."""
        torch.manual_seed(seed)
        return self.kind()

    def batch(self, round: int, instances: int | None = None) -> tuple[list[Any], ...]:
        """The arguments of a minibatch, other data in each round."""
        torch.manual_seed(round)
        return self.draw(random.Random(round), instances or self.instances)

    def decorate(self, model: nn.Module, **options: Any) -> Callable[..., Any]:
        """The model's decorated forward."""
        fn = type(model).loss if isinstance(model, TreeLSTM) else type(model).forward
        fn = getattr(fn, "__wrapped__", fn)
        return fxbatch.autobatch(**options)(fn.__get__(model))  # type: ignore[no-any-return]

    def alone(self, model: nn.Module) -> Callable[..., Any]:
        """The undecorated forward of one instance."""
        fn = type(model).loss if isinstance(model, TreeLSTM) else type(model).forward
        found: Callable[..., Any] = getattr(fn, "__wrapped__", fn).__get__(model)
        return found


ROWS: dict[str, Row] = {
    row.name: row
    for row in (
        Row("scatter graph network", ScatterNetwork, scattered, 64),
        Row("MPNN with edge_index", MessagePassing, connected),
        Row("attention, 9 lengths", Attention, sentences(8, 17)),
        Row(
            "embed, MLP, mean",
            BagOfWords,
            lambda rng, n: ([torch.randint(0, 1000, (rng.randint(5, 30),)) for _ in range(n)],),
        ),
        Row(
            "Conv1d",
            Convolution1d,
            lambda rng, n: ([floats(4, rng.randint(20, 80)) for _ in range(n)],),
        ),
        Row(
            "conv2d",
            Convolution2d,
            lambda rng, n: ([floats(3, rng.randint(10, 30), rng.randint(10, 30)) for _ in range(n)],),
        ),
        Row("mask mixture of experts", MaskedExperts, sentences(8, 25)),
        Row("CRF forward", ConditionalField, tagged),
        Row("CRF Viterbi", Viterbi, sentences(4, 16)),
        Row("beam search", BeamSearch, vectors),
        Row("adaptive computation time", AdaptiveTime, vectors),
        Row("tree decoder", TreeDecoder, vectors),
        Row("pointer network", PointerNetwork, lambda rng, n: (list(floats(n, 6, D)),)),
        Row(
            "greedy autoencoder",
            GreedyAutoencoder,
            lambda rng, n: ([list(floats(rng.randint(4, 8), D)) for _ in range(n)],),
        ),
        Row("frames [T, 40]", Frames, sentences(100, 1501, width=40), 8),
        Row("floats that differ", AnnealedClamp, annealed),
        Row("nn.LSTM, new T", Recurrent, sentences(5, 60), 32),
        Row("Transformer layer", Encoder, sentences(5, 40), 32),
        Row(
            "Tree-LSTM",
            lambda: TreeLSTM(1000, embedding=64, hidden=64),
            lambda rng, n: (random_trees(n, leaves=12, words=1000, seed=rng.randrange(1 << 30)),),
            64,
        ),
    )
}
