"""The text pipeline of Looks et al. 2017, section 3.2: words, an embedding, a fold over Concat and a layer, and a sum.

In: pairs (sentence, label 0-4) of the Stanford Sentiment Treebank. Out: (loss, logits). A word that training has not
seen is None to the dictionary, and looked up in the last row of the table. Beside the paper's recurrent vector of a
sentence stands the sum of its word vectors, so that a sentence is known by its words and by their order.

    python -m examples.fold.text2vec --sentences 600 --epochs 3
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from fxbatch_examples.fold.text_pipeline import CLASSES, read_sentences
from fxbatch_examples.fold.training import accuracy, console, fit
from torch import nn

import fxbatch.blocks as fb
from fxbatch.data.generated import generate_treebank
from fxbatch.data.paths import find_data


class Layers:
    """The words, and the layers with the parameters, for both implementations."""

    def __init__(self, words: Sequence[str], size: int = 50, hidden: int = 64) -> None:
        self.size, self.hidden = size, hidden
        self.number = {w: i for i, w in enumerate(words)}
        self.vectors = fb.Embedding(len(words) + 1, size, initializer=nn.init.normal_)
        self.step = fb.FC(hidden, activation=torch.tanh)
        self.logits = fb.FC(CLASSES, activation=None)


# [blocks
def build(layers: Layers) -> fb.Block:
    """The pipeline: PyObjectType -> (loss, logits)."""
    unknown = fb.FromTensor(torch.tensor(len(layers.number)))
    word2vec = (
        fb.InputTransform(layers.number.get) >> fb.Optional(fb.Scalar("int64"), unknown) >> layers.vectors
    )
    rnn_cell = fb.Concat() >> layers.step
    words = fb.InputTransform(str.split) >> fb.Map(word2vec)
    text2vec = words >> fb.AllOf(fb.Fold(rnn_cell, fb.Zeros(layers.hidden)), fb.Sum()) >> fb.Concat()
    text2logits = text2vec >> layers.logits
    record = fb.Record([(0, text2logits), (1, fb.Scalar("int64"))])
    return record >> fb.AllOf(fb.Function(F.cross_entropy), fb.GetItem(0))


# blocks]


# [plain
def plain(layers: Layers, instance: tuple[str, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The model in plain PyTorch, for one instance."""
    sentence, label = instance
    dtype = layers.vectors.weight.dtype
    state, total = torch.zeros(layers.hidden, dtype=dtype), torch.zeros(layers.size, dtype=dtype)
    for w in sentence.split():
        x = layers.vectors(torch.tensor(layers.number.get(w, len(layers.number))))
        state = layers.step(torch.cat([state, x]))
        total = total + x
    logits = layers.logits(torch.cat([state, total]))
    return F.cross_entropy(logits, torch.tensor(label)), logits


# plain]


def minibatch(instances: int = 8, seed: int = 0) -> tuple[nn.Module, list[tuple[str, int]]]:
    """A model and sentences of the generated treebank, of which a few words are left out of the dictionary."""
    torch.manual_seed(seed)
    pairs = [
        (" ".join(leaf.word or "" for leaf in t.leaves()), t.label) for t in generate_treebank(seed)["train"]
    ]
    words = list(dict.fromkeys(word for sentence, _ in pairs for word in sentence.split()))
    return fb.compile(build(Layers(words[2:]))), pairs[:instances]


def main(argv: Sequence[str] | None = None) -> float:
    """Train, and print the accuracy on the dev set."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder of the treebank")
    parser.add_argument("--sentences", type=int, default=1500)
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    folder = find_data("sst") if options.data is None else options.data
    training = read_sentences(folder, "train", options.sentences)
    dev = read_sentences(folder, "dev", min(options.sentences, 500))
    counts = Counter(w for s, _ in training for w in s.split())
    model = fb.compile(build(Layers([w for w, n in counts.items() if n > 1])))
    fit(model, training, epochs=options.epochs, lr=3e-3)
    found = accuracy(model, dev, [label for _, label in dev])
    console.print(f"dev accuracy {found:.3f} (5 classes)")
    return found


if __name__ == "__main__":
    main()
