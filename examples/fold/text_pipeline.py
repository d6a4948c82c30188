"""A text pipeline, from a string to the loss of its sentiment class (Looks et al. 2017, section 3.3).

In: pairs (sentence, label 0-4) of the Stanford Sentiment Treebank. Out: (loss, logits).
Words that training has not seen are looked up in the last row of the table.

    python examples/fold/text_pipeline.py --sentences 600 --epochs 3
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from fxbatch_examples.fold.training import accuracy, console, fit
from torch import nn

import fxbatch.blocks as fb
from fxbatch.data.generated import generate_treebank
from fxbatch.data.paths import file_in, find_data
from fxbatch.data.sst import read_trees

CLASSES = 5


class Layers:
    """The words, and the modules with the parameters, for both implementations."""

    def __init__(self, words: Sequence[str], size: int = 50, hidden: int = 64, vectors: Any = None) -> None:
        self.number = {w: i for i, w in enumerate(words)}
        self.vectors = fb.Embedding(
            len(words) + 1, size, initializer=nn.init.normal_ if vectors is None else vectors
        )
        self.cell = nn.LSTMCell(size, hidden)
        self.logits = fb.FC(CLASSES, activation=None)


# [blocks
def build(layers: Layers) -> fb.Block:
    """The pipeline: PyObjectType -> (loss, logits)."""
    number, unknown = layers.number, len(layers.number)
    word = fb.InputTransform(lambda w: number.get(w, unknown)) >> fb.Scalar("int64") >> layers.vectors
    words = fb.InputTransform(str.split) >> fb.Map(word)
    logits = words >> fb.RNN(layers.cell) >> fb.GetItem(1) >> fb.GetItem(0) >> layers.logits
    loss = fb.Function(F.cross_entropy)
    return (logits, fb.Scalar("int64")) >> fb.AllOf(loss, fb.GetItem(0))


# blocks]


# [plain
def plain(layers: Layers, instance: tuple[str, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The model in plain PyTorch, for one instance."""
    sentence, label = instance
    dtype = layers.vectors.weight.dtype
    h = c = torch.zeros(layers.cell.hidden_size, dtype=dtype)
    for w in sentence.split():
        x = layers.vectors(torch.tensor(layers.number.get(w, len(layers.number))))
        h, c = layers.cell(x, (h, c))
    logits = layers.logits(h)
    return F.cross_entropy(logits, torch.tensor(label)), logits


# plain]


def read_sentences(folder: Path, split: str, limit: int) -> list[tuple[str, int]]:
    """(sentence, label) pairs, spread over the file."""
    trees = read_trees(file_in(folder, f"{split}.txt"))
    stride = max(len(trees) // max(limit, 1), 1)
    chosen = trees[::stride][:limit]
    return [(" ".join(leaf.word for leaf in t.leaves()), t.label) for t in chosen]


def read_vectors(path: Path, words: Sequence[str], size: int) -> torch.Tensor:
    """Word vectors from a text file (`word v1 v2 ...` a line); words that it lacks, and unknown: small noise."""
    table = torch.randn(len(words) + 1, size) * 0.1
    number = {w: i for i, w in enumerate(words)}
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            word, *numbers = line.rstrip().split(" ")
            if word in number and len(numbers) == size:
                table[number[word]] = torch.tensor([float(n) for n in numbers])
    return table


def minibatch(instances: int = 8, seed: int = 0) -> tuple[nn.Module, list[tuple[str, int]]]:
    """A model and sentences of the generated treebank."""
    torch.manual_seed(seed)
    pairs = [
        (" ".join(leaf.word or "" for leaf in t.leaves()), t.label) for t in generate_treebank(seed)["train"]
    ]
    words = list(dict.fromkeys(word for sentence, _ in pairs for word in sentence.split()))
    return fb.compile(build(Layers(words))), pairs[:instances]


def main(argv: Sequence[str] | None = None) -> float:
    """Train, and print the accuracy on the dev set."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder of the treebank")
    parser.add_argument("--sentences", type=int, default=1500)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--vectors", type=Path, help="text file of word vectors of 50 numbers")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    folder = find_data("sst") if options.data is None else options.data
    training = read_sentences(folder, "train", options.sentences)
    dev = read_sentences(folder, "dev", min(options.sentences, 500))
    counts = Counter(w for s, _ in training for w in s.split())
    words = [w for w, n in counts.items() if n > 1]
    vectors = None if options.vectors is None else read_vectors(options.vectors, words, 50)
    model = fb.compile(build(Layers(words, vectors=vectors)))
    fit(model, training, epochs=options.epochs, lr=3e-3)
    found = accuracy(model, dev, [label for _, label in dev])
    console.print(f"dev accuracy {found:.3f} (5 classes)")
    return found


if __name__ == "__main__":
    main()
