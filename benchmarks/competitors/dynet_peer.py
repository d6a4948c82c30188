"""DyNet itself, with its own automatic batching: Tree-LSTM and BiLSTM tagger, forward and backward.

In: trees and sentences of the benchmark models. Out: the summed loss, in DyNet's float32; `gradients()` under
the model's names. DyNet has its own parameters: copies of the model's.

    hand = DyNetTreeLSTM(model)
    hand.loss(trees)                         # a float: forward and, with `train`, backward
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import dynet_config  # must come before dynet, which reads it

dynet_config.set(autobatch=1, mem=1024, random_seed=1)

import dynet as dy  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.models import Node, TreeLSTM  # noqa: E402
from examples.bilstm_tagger import Sentence, Tagger  # noqa: E402


class DyNetModel:
    """Parameters under the names of a PyTorch model."""

    def __init__(self, model: torch.nn.Module, table: str = "embed.weight") -> None:
        self.collection = dy.ParameterCollection()
        self.parameters: dict[str, Any] = {}
        for name, parameter in model.named_parameters():
            values = parameter.detach().float().cpu().numpy()
            make = self.collection.lookup_parameters_from_numpy if name == table else None
            self.parameters[name] = (make or self.collection.parameters_from_numpy)(values)

    def __getitem__(self, name: str) -> Any:
        return self.parameters[name]

    def run(self, losses: Sequence[Any], train: bool) -> float:
        """The sum of the losses; gradients are added up with `train`."""
        total = dy.esum(list(losses))
        value = float(total.value())
        if train:
            total.backward()
        return value

    def gradients(self) -> dict[str, Tensor | None]:
        """Gradients of what `loss` was called for since `clear`, under the model's names."""
        return {
            name: torch.from_numpy(np.array(p.grad_as_array(), dtype=np.float32))
            for name, p in self.parameters.items()
        }

    def clear(self) -> None:
        """Forget the gradients. No step of its own: a trainer's update clears the rows of tables that have any."""
        for parameter in self.parameters.values():
            parameter.scale_gradient(0.0)


def evaluated(rows: Sequence[Any]) -> Tensor:
    """The values of vectors of one length, one after the other as rows, computed together."""
    return torch.from_numpy(np.array(dy.concatenate_cols(list(rows)).npvalue().T, dtype=np.float32))


class DyNetTreeLSTM(DyNetModel):
    """benchmarks.models.TreeLSTM."""

    def __init__(self, model: TreeLSTM) -> None:
        super().__init__(model)
        self.all_nodes = model.all_nodes
        self.hidden = model.out.in_features

    def loss(self, trees: Sequence[Node], train: bool = True) -> float:
        """The sum of the losses of the trees."""
        dy.renew_cg()
        losses: list[Any] = []
        for tree in trees:
            root = self._encode(tree, losses if self.all_nodes else None)
            if not self.all_nodes:
                losses.append(dy.pickneglogsoftmax(self._scores(root[0]), int(tree.label)))
        return self.run(losses, train)

    def __call__(self, trees: Sequence[Node]) -> Tensor:
        """Scores `[trees, classes]` of the roots."""
        dy.renew_cg()
        return evaluated([self._scores(self._encode(tree, None)[0]) for tree in trees])

    def _scores(self, h: Any) -> Any:
        return dy.affine_transform([self["out.bias"], self["out.weight"], h])

    def _encode(self, tree: Node, losses: list[Any] | None) -> tuple[Any, Any]:
        """State and memory of the root; the losses of all nodes are added to `losses`."""
        n = self.hidden
        if tree.left is None or tree.right is None:
            assert tree.word is not None
            x = self["embed.weight"][int(tree.word)]
            gates = dy.affine_transform([self["leaf.gates.bias"], self["leaf.gates.weight"], x])
            i, o, u = (dy.pick_range(gates, k * n, (k + 1) * n) for k in range(3))
            c = dy.cmult(dy.logistic(i), dy.tanh(u))
        else:
            hl, cl = self._encode(tree.left, losses)
            hr, cr = self._encode(tree.right, losses)
            children = dy.concatenate([hl, hr])
            gates = dy.affine_transform([self["cell.gates.bias"], self["cell.gates.weight"], children])
            i, fl, fr, o, u = (dy.pick_range(gates, k * n, (k + 1) * n) for k in range(5))
            kept = dy.cmult(dy.logistic(fl), cl) + dy.cmult(dy.logistic(fr), cr)
            c = dy.cmult(dy.logistic(i), dy.tanh(u)) + kept
        h = dy.cmult(dy.logistic(o), dy.tanh(c))
        if losses is not None:
            losses.append(dy.pickneglogsoftmax(self._scores(h), int(tree.label)))
        return h, c


class DyNetTagger(DyNetModel):
    """examples.bilstm_tagger.Tagger; a cell's two biases, which are only ever added, are one parameter.

    DyNet batches no products whose biases are sums of their own.
    """

    def __init__(self, model: Tagger) -> None:
        super().__init__(model)
        self.layers = len(model.left_to_right)
        self.hidden = model.out.in_features // 2
        biases = dict(model.named_parameters())
        for name in [name for name in biases if name.endswith("bias_ih")]:
            other = name.removesuffix("ih") + "hh"
            both = (biases[name] + biases[other]).detach().float().cpu().numpy()
            self.parameters[name] = self.parameters[other] = self.collection.parameters_from_numpy(both)

    def loss(self, sentences: Sequence[Sentence], train: bool = True) -> float:
        """The sum of the losses of all words."""
        dy.renew_cg()
        losses = []
        for sentence in sentences:
            for scores, tag in zip(self._scores(sentence), sentence.tags, strict=True):
                losses.append(dy.pickneglogsoftmax(scores, int(tag)))
        return self.run(losses, train)

    def __call__(self, sentences: Sequence[Sentence]) -> Tensor:
        """Scores `[words, tags]` of all words, sentence after sentence."""
        dy.renew_cg()
        return evaluated([scores for sentence in sentences for scores in self._scores(sentence)])

    def _scores(self, sentence: Sentence) -> list[Any]:
        vectors = [self["embed.weight"][int(word)] for word in sentence.words]
        for layer in range(self.layers):
            left = self._states(f"left_to_right.{layer}", vectors)
            right = self._states(f"right_to_left.{layer}", vectors[::-1])[::-1]
            vectors = [dy.concatenate(list(pair)) for pair in zip(left, right, strict=True)]
        out = self["out.bias"], self["out.weight"]
        return [dy.affine_transform([*out, vector]) for vector in vectors]

    def _states(self, cell: str, vectors: list[Any]) -> list[Any]:
        n = self.hidden
        bias = self[f"{cell}.bias_ih"]
        h = c = dy.zeros(n)
        hidden = []
        for vector in vectors:
            weights = self[f"{cell}.weight_ih"], self[f"{cell}.weight_hh"]
            gates = dy.affine_transform([bias, weights[0], vector, weights[1], h])
            i, f, g, o = (dy.pick_range(gates, k * n, (k + 1) * n) for k in range(4))
            c = dy.cmult(dy.logistic(f), c) + dy.cmult(dy.logistic(i), dy.tanh(g))
            h = dy.cmult(dy.logistic(o), dy.tanh(c))
            hidden.append(h)
        return hidden
