"""Dependency parser over a Transformer encoder, written for ONE sentence: rows of an encoded `[T, d]` feed its actions.

In: a sentence, as word and part-of-speech ids `[T]`. Out: the head and the relation of each word. The parser is that
of `parser.py`; where that runs BiLSTMs word by word, here one encoder takes the whole sentence. All sentences of a
minibatch are encoded packed (docs/sizes.md), the vectors of the words are rows where they lie, and actions batch as
before.

    model, sentences = minibatch()
    parses = model(sentences)
    model.loss(sentences).sum().backward()
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Sequence

import torch
from fxbatch_examples import parser
from fxbatch_examples.command import add_checkpoint, positive, run, training_options
from torch import Tensor, nn


class Encoder(nn.Module):
    """Embeddings of a word, its tag and its place; the root stands last; Transformer layers."""

    frequencies: Tensor

    def __init__(self, words: int, tags: int, *, width: int, heads: int, layers: int):
        super().__init__()
        self.word, self.tag = nn.Embedding(words, width), nn.Embedding(tags, width)
        self.root = nn.Parameter(torch.randn(1, width))
        layer = nn.TransformerEncoderLayer(width, heads, 2 * width, 0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), enable_nested_tensor=False)
        frequencies = 10_000 ** (-torch.arange(width // 2) / (width // 2))
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, words: Tensor, tags: Tensor) -> Tensor:
        """Ids `[T]` to vectors `[T + 1, width]`: those of the words, then that of the root."""
        rows = torch.cat([self.word(words) + self.tag(tags), self.root])
        angles = torch.arange(len(rows), device=rows.device).unsqueeze(1) * self.frequencies
        encoded: Tensor = self.layers(rows + torch.cat([angles.sin(), angles.cos()], 1))
        return encoded


class TransformerParser(parser.Parser):
    """The parser with another encoder; sentences hold ids `[T]`."""

    def __init__(
        self,
        words: int,
        tags: int,
        relations: int,
        *,
        hidden: int = 64,
        heads: int = 4,
        layers: int = 2,
        classifier: int = 100,
        word_dropout: float = 0.25,
    ):
        super().__init__(
            1, 1, relations, hidden=hidden, layers=0, classifier=classifier, word_dropout=word_dropout
        )
        self.encoder = Encoder(words, tags, width=2 * hidden, heads=heads, layers=layers)
        del self.word, self.tag, self.root

    def encode(self, sentence: parser.Sentence, chance: random.Random | None = None) -> list[Tensor]:
        """Vectors `[2 * hidden]` of the words, of the root, and of a missing word."""
        words = sentence.words
        assert isinstance(words, Tensor)
        if chance is not None:
            hide = [chance.random() < self.word_dropout for _ in range(len(words))]
            words = words.masked_fill(torch.tensor(hide, device=words.device), 0)  # the unknown word
        return [*self.encoder(words, sentence.tags), self.missing(self.first)]


def build(words: int, tags: int, relations: int, *, hidden: int = 64, layers: int = 2) -> TransformerParser:
    """The model."""
    return TransformerParser(words, tags, relations, hidden=hidden, layers=layers)


def as_tensors(sentence: parser.Sentence) -> parser.Sentence:
    """The sentence with its word ids in one tensor `[T]`, and its tag ids in one."""
    words, tags = torch.stack(list(sentence.words)), torch.stack(list(sentence.tags))
    return dataclasses.replace(sentence, words=words, tags=tags)


def minibatch(
    *, sentences: int = 4, hidden: int = 8, seed: int = 0
) -> tuple[TransformerParser, list[parser.Sentence]]:
    """A small model and random sentences of 2 to 7 words, each a chain of arcs."""
    _, instances = parser.minibatch(sentences=sentences, seed=seed)
    return build(30, 6, 4, hidden=hidden), list(map(as_tensors, instances))


def main(argv: Sequence[str] | None = None) -> tuple[float, float]:
    """Train on the projective sentences of EWT; attachment scores on all dev sentences after each epoch."""
    options = training_options(main.__doc__, "ud_ewt", epochs=5)
    options.add_argument("--hidden", type=positive, default=64, help="half of a vector's size")
    options.add_argument("--layers", type=positive, default=2)
    add_checkpoint(options)
    args = options.parse_args(argv)
    return parser.train(args, functools.partial(build, hidden=args.hidden, layers=args.layers), as_tensors)


if __name__ == "__main__":
    run(main)
