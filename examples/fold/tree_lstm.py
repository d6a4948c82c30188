"""A recursive Tree-LSTM over parse trees, with a word and a pair case (Looks et al. 2017, section 3.5).

In: trees of the Stanford Sentiment Treebank. Out: (loss summed over the tree's nodes, logits of the root).

    python examples/fold/tree_lstm.py --trees 400 --epochs 3
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from fxbatch_examples.fold.training import accuracy, console, fit
from torch import nn

import fxbatch.blocks as fb
from fxbatch.data.generated import generate_treebank
from fxbatch.data.paths import find_data
from fxbatch.data.sst import Tree, read_sst

CLASSES = 5
State = tuple[torch.Tensor, torch.Tensor]


class PairCell(nn.Module):
    """The binary Tree-LSTM of Tai et al. 2015: two states [n] to one, a forget gate a child."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.gates = nn.Linear(2 * n, 5 * n)

    def forward(self, left: State, right: State) -> State:
        i, f, g, o, u = self.gates(torch.cat([left[0], right[0]], -1)).chunk(5, -1)
        c = i.sigmoid() * u.tanh() + f.sigmoid() * left[1] + g.sigmoid() * right[1]
        return o.sigmoid() * c.tanh(), c


class WordCell(nn.Module):
    """A leaf: a word vector [n] to a state."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.gates = nn.Linear(n, 3 * n)

    def forward(self, x: torch.Tensor) -> State:
        i, o, u = self.gates(x).chunk(3, -1)
        c = i.sigmoid() * u.tanh()
        return o.sigmoid() * c.tanh(), c


class Layers:
    """The parameters of both implementations; n is the size of word vectors and states."""

    def __init__(self, words: Sequence[str], n: int = 64) -> None:
        self.n = n
        self.number = {w: i for i, w in enumerate(words)}
        self.vectors = fb.Embedding(len(words) + 1, n, initializer=nn.init.normal_)
        self.word, self.pair = WordCell(n), PairCell(n)
        self.logits = fb.FC(CLASSES, activation=None)


# [blocks
def build(layers: Layers, dtype: str = "float32") -> fb.Block:
    """The model: PyObjectType -> (loss, logits of the root)."""
    number, unknown, state = layers.number, len(layers.number), ([layers.n, dtype],) * 2
    node = fb.ForwardDeclaration(fb.PyObjectType(), (state, [dtype], [CLASSES, dtype]), name="node")
    lookup = fb.InputTransform(lambda t: number.get(t.word, unknown)) >> fb.Scalar("int64") >> layers.vectors
    word = lookup >> fb.AllOf(fb.Function(layers.word), fb.Zeros([dtype]))
    pair = fb.AllOf(
        fb.InputTransform(lambda t: t.left) >> node(), fb.InputTransform(lambda t: t.right) >> node()
    )
    joined = fb.Composition()
    with joined.scope():
        left, right = joined.input[0], joined.input[1]
        total = fb.Function(torch.add).reads(left[1], right[1])
        joined.output.reads(fb.Function(layers.pair).reads(left[0], right[0]), total)
    case = fb.OneOf(lambda t: t.is_leaf, {True: word, False: pair >> joined})
    model = fb.Composition(name="model")
    with model.scope():
        state, below = case.reads(model.input)
        logits = layers.logits.reads(state[0])
        label = (fb.InputTransform(lambda t: t.label) >> fb.Scalar("int64")).reads(model.input)
        loss = fb.Function(torch.add).reads(below, fb.Function(F.cross_entropy).reads(logits, label))
        model.output.reads(state, loss, logits)
    node.resolve_to(model)
    return model >> fb.AllOf(fb.GetItem(1), fb.GetItem(2))


# blocks]


# [plain
def plain(layers: Layers, tree: Tree[int, str]) -> tuple[torch.Tensor, torch.Tensor]:
    """The model in plain PyTorch, for one instance."""

    def node(t: Any) -> tuple[State, torch.Tensor, torch.Tensor]:
        if t.is_leaf:
            state = layers.word(layers.vectors(torch.tensor(layers.number.get(t.word, len(layers.number)))))
            below = torch.zeros((), dtype=layers.vectors.weight.dtype)
        else:
            (left, l, _), (right, r, _) = node(t.left), node(t.right)
            state, below = layers.pair(left, right), l + r
        logits = layers.logits(state[0])
        return state, below + F.cross_entropy(logits, torch.tensor(t.label)), logits

    return node(tree)[1:]


# plain]


def minibatch(instances: int = 8, seed: int = 0) -> tuple[nn.Module, list[Tree[int, str]]]:
    """A model and trees of the generated treebank."""
    torch.manual_seed(seed)
    trees = generate_treebank(seed)["train"]
    words = list(dict.fromkeys(leaf.word or "" for tree in trees for leaf in tree.leaves()))
    return fb.compile(build(Layers(words))), trees[:instances]


def main(argv: Sequence[str] | None = None) -> float:
    """Train, and print the accuracy of the root's label on the dev set."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder of the treebank")
    parser.add_argument("--trees", type=int, default=800)
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    sets = read_sst(find_data("sst") if options.data is None else options.data)
    training = sets["train"][:: max(len(sets["train"]) // options.trees, 1)][: options.trees]
    dev = sets["dev"][:: max(len(sets["dev"]) // options.trees, 1)][: options.trees]
    words = list(dict.fromkeys(leaf.word or "" for t in training for leaf in t.leaves()))
    model = fb.compile(build(Layers(words)))
    fit(model, training, epochs=options.epochs, lr=3e-3)
    found = accuracy(model, dev, [t.label for t in dev])
    console.print(f"dev accuracy {found:.3f} at the root (5 classes)")
    return found


if __name__ == "__main__":
    main()
