"""Per-instance models on tensors of their own sizes, and the same work by hand for a minibatch.

In: a minibatch as columns. Out: what the decorated forward gives, stacked; by hand it is packed, padded or with
offsets, whichever is usual for the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

WORDS, ATOMS, SIZE = 1000, 20, 64
Columns = Sequence[Sequence[torch.Tensor]]


class MeanOfWords(nn.Module):
    """Embedding, a layer with a ReLU, the mean over the words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, SIZE)
        self.mlp = nn.Sequential(nn.Linear(SIZE, SIZE), nn.ReLU(), nn.Linear(SIZE, SIZE))
        self.out = nn.Linear(SIZE, 5)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.mlp(self.embed(words)).mean(0))


def mean_by_hand(m: Any, words: Sequence[torch.Tensor]) -> torch.Tensor:
    sizes = torch.tensor([len(w) for w in words])
    segment = torch.repeat_interleave(torch.arange(len(words)), sizes)
    h = m.mlp(m.embed(torch.cat(list(words))))
    return m.out(h.new_zeros(len(words), SIZE).index_add(0, segment, h) / sizes.unsqueeze(1))


class AttentionPooling(nn.Module):
    """A softmax over the words weighs them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, SIZE)
        self.hidden = nn.Linear(SIZE, SIZE)
        self.score = nn.Linear(SIZE, 1)
        self.out = nn.Linear(SIZE, 5)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.hidden(self.embed(words)))
        return self.out((torch.softmax(self.score(h), 0) * h).sum(0))


def pooling_by_hand(m: Any, words: Sequence[torch.Tensor]) -> torch.Tensor:
    sizes = torch.tensor([len(w) for w in words])
    n = len(words)
    segment = torch.repeat_interleave(torch.arange(n), sizes)
    h = torch.tanh(m.hidden(m.embed(torch.cat(list(words)))))
    score = m.score(h).squeeze(1)
    top = score.new_full((n,), float("-inf")).scatter_reduce(0, segment, score.detach(), "amax")
    weight = (score - top[segment]).exp()
    weight = weight / weight.new_zeros(n).index_add(0, segment, weight)[segment]
    return m.out(h.new_zeros(n, SIZE).index_add(0, segment, weight.unsqueeze(1) * h))


class Encoder(nn.Module):
    """A Transformer encoder of two layers, the mean over the words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, SIZE)
        layer = nn.TransformerEncoderLayer(SIZE, 4, 2 * SIZE, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(SIZE, 5)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.encoder(self.embed(words)).mean(0))


def encoder_by_hand(m: Any, words: Sequence[torch.Tensor]) -> torch.Tensor:
    sizes = torch.tensor([len(w) for w in words])
    padded = nn.utils.rnn.pad_sequence(list(words), batch_first=True)
    hidden = torch.arange(padded.shape[1]) >= sizes.unsqueeze(1)
    h = m.encoder(m.embed(padded), src_key_padding_mask=hidden)
    return m.out(h.masked_fill(hidden.unsqueeze(2), 0).sum(1) / sizes.unsqueeze(1))


class GraphNetwork(nn.Module):
    """Three rounds of messages along edges [2, E], summed at their targets, into a GRUCell."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(ATOMS, SIZE)
        self.message = nn.Linear(SIZE, SIZE)
        self.update = nn.GRUCell(SIZE, SIZE)
        self.out = nn.Linear(SIZE, 1)

    def forward(self, atoms: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        h = self.embed(atoms)
        for _ in range(3):
            messages = torch.relu(self.message(h))[edges[0]]
            h = self.update(torch.zeros_like(h).index_add(0, edges[1], messages), h)
        return self.out(h.sum(0))


def graphs_by_hand(m: Any, atoms: Sequence[torch.Tensor], edges: Sequence[torch.Tensor]) -> torch.Tensor:
    sizes = torch.tensor([len(a) for a in atoms])
    segment = torch.repeat_interleave(torch.arange(len(atoms)), sizes)
    first = torch.cumsum(sizes, 0) - sizes
    counts = torch.tensor([e.shape[1] for e in edges])
    joined = torch.cat(list(edges), 1) + torch.repeat_interleave(first, counts)
    h = m.embed(torch.cat(list(atoms)))
    for _ in range(3):
        messages = torch.relu(m.message(h))[joined[0]]
        h = m.update(torch.zeros_like(h).index_add(0, joined[1], messages), h)
    return m.out(h.new_zeros(len(atoms), SIZE).index_add(0, segment, h))


class BiLSTM(nn.Module):
    """nn.LSTM in both directions, the mean over the words."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, SIZE)
        self.lstm = nn.LSTM(SIZE, SIZE // 2, bidirectional=True)
        self.out = nn.Linear(SIZE, 5)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(self.embed(words))[0].mean(0))


def lstm_by_hand(m: Any, words: Sequence[torch.Tensor]) -> torch.Tensor:
    sizes = torch.tensor([len(w) for w in words])
    rows = m.embed(torch.cat(list(words))).split([len(w) for w in words])
    packed = nn.utils.rnn.pack_sequence(list(rows), enforce_sorted=False)
    h, _ = nn.utils.rnn.pad_packed_sequence(m.lstm(packed)[0], batch_first=True)
    return m.out(h.sum(1) / sizes.unsqueeze(1))


class Convolution(nn.Module):
    """A convolution along the words, the maximum over them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, SIZE)
        self.conv = nn.Conv1d(SIZE, SIZE, 3, padding=1)
        self.out = nn.Linear(SIZE, 5)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.conv(self.embed(words).t())).amax(1))


def convolution_by_hand(m: Any, words: Sequence[torch.Tensor]) -> torch.Tensor:
    sizes = torch.tensor([len(w) for w in words])
    padded = nn.utils.rnn.pad_sequence(list(words), batch_first=True)
    kept = (torch.arange(padded.shape[1]) < sizes.unsqueeze(1)).unsqueeze(2)
    h = torch.relu(m.conv((m.embed(padded) * kept).transpose(1, 2)))
    return m.out(h.masked_fill(~kept.transpose(1, 2), float("-inf")).amax(2))


def sentences(n: int) -> Columns:
    """[T] words of n sentences, T from 5 to 40."""
    return [[torch.randint(WORDS, (int(t),)) for t in torch.randint(5, 41, (n,))]]


def graphs(n: int) -> Columns:
    """Atoms [N] and edges [2, E] of n random graphs of the size of molecules, each bond in both directions."""
    atoms, edges = [], []
    for size in torch.randint(5, 41, (n,)).tolist():
        atoms.append(torch.randint(ATOMS, (size,)))
        bonds = torch.randint(size, (2, size))
        edges.append(torch.cat([bonds, bonds.flip(0)], 1))
    return [atoms, edges]


@dataclass(frozen=True)
class SizedRow:
    """A model, its work by hand, and its data."""

    name: str
    model: Callable[[], nn.Module]
    by_hand: Callable[..., torch.Tensor]
    batch: Callable[[int], Columns]
    how: str


ROWS = (
    SizedRow("embed, MLP, mean", MeanOfWords, mean_by_hand, sentences, "packed"),
    SizedRow("attention pooling", AttentionPooling, pooling_by_hand, sentences, "packed"),
    SizedRow("Transformer encoder, 2 layers", Encoder, encoder_by_hand, sentences, "padded, masked"),
    SizedRow("graph network, edges [2, E]", GraphNetwork, graphs_by_hand, graphs, "offsets"),
    SizedRow("BiLSTM", BiLSTM, lstm_by_hand, sentences, "packed sequences"),
    SizedRow("Conv1d, maximum", Convolution, convolution_by_hand, sentences, "padded"),
)


__all__ = ["ROWS", "SizedRow"]
