"""DyNet's algorithm (Neubig, Goldberg & Dyer 2017, section 3) over eager PyTorch: signatures and an agenda.

In: expressions built one instance after the other: nothing is computed. Out: their values, computed in
batches of one signature, the signature with the lowest average depth first; autograd does the rest. Operands
that stand side by side in one batch's result are read in place, others are copied together.

    batch = Agenda()
    x = batch.look_up(table, 17)
    h = batch.affine(weight, bias, x).tanh()
    batch.values([h])[0].sum().backward()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import Node, TreeLSTM
from examples.bilstm_tagger import Sentence, Tagger


class Expression:
    """A value to come: signature (compared whole), inputs, depth, shape of one value."""

    __slots__ = ("batch", "depth", "function", "inputs", "key", "shape", "static", "value")

    def __init__(
        self,
        batch: Agenda,
        key: tuple[Any, ...],
        function: Callable[..., Tensor],
        inputs: tuple[Expression, ...],
        shape: tuple[int, ...],
        static: Any = None,
    ) -> None:
        self.batch, self.function, self.inputs, self.shape, self.static = (
            batch,
            function,
            inputs,
            shape,
            static,
        )
        self.key = (*key, *(x.shape for x in inputs))
        self.depth: int = 1 + max((x.depth for x in inputs), default=-1)
        self.value: tuple[Tensor, int] | None = None  # a batch's result and the row in it
        batch.pending.append(self)

    def __add__(self, other: Expression) -> Expression:
        return self.batch.call("add", torch.add, (self, other), self.shape)

    def __mul__(self, other: Expression) -> Expression:
        return self.batch.call("mul", torch.mul, (self, other), self.shape)

    def tanh(self) -> Expression:
        return self.batch.call("tanh", torch.tanh, (self,), self.shape)

    def sigmoid(self) -> Expression:
        return self.batch.call("sigmoid", torch.sigmoid, (self,), self.shape)

    def part(self, start: int, stop: int) -> Expression:
        """Elements `start : stop`."""
        return self.batch.call(("part", start, stop), lambda x: x[:, start:stop], (self,), (stop - start,))


class Agenda:
    """Builds expressions, and runs what is pending in batches."""

    def __init__(self) -> None:
        self.pending: list[Expression] = []
        self.launches = 0

    def call(
        self,
        key: Any,
        function: Callable[..., Tensor],
        inputs: tuple[Expression, ...],
        shape: tuple[int, ...],
    ) -> Expression:
        """A function of rows, once for all calls of the same key and input shapes."""
        return Expression(self, (key,), function, inputs, shape)

    def look_up(self, table: Tensor, row: int) -> Expression:
        """A row of a table."""
        rows = lambda ids: F.embedding(ids, table)  # noqa: E731
        return Expression(self, ("look_up", id(table)), rows, (), (table.shape[1],), row)

    def affine(self, weight: Tensor, bias: Tensor, x: Expression) -> Expression:
        """`weight @ x + bias`."""
        key = ("affine", id(weight), id(bias))
        return Expression(self, key, lambda rows: F.linear(rows, weight, bias), (x,), (weight.shape[0],))

    def join(self, *parts: Expression) -> Expression:
        """Vectors one after the other."""
        size = sum(part.shape[0] for part in parts)
        return self.call("join", lambda *rows: torch.cat(rows, 1), parts, (size,))

    def cross_entropy(self, scores: Expression, label: int) -> Expression:
        """The loss of scores and a label; batched over different labels."""
        rows = lambda x, labels: F.cross_entropy(x, labels, reduction="none")  # noqa: E731
        return Expression(self, ("cross_entropy",), rows, (scores,), (), label)

    def values(self, wanted: Sequence[Expression]) -> list[Tensor]:
        """Run everything pending; the values of the expressions wanted."""
        waiting: dict[int, int] = {}
        readers: dict[int, list[Expression]] = {}
        ready: dict[tuple[Any, ...], list[Expression]] = {}
        sums: dict[tuple[Any, ...], list[float]] = {}  # of the depths of what is left, and how many
        for expression in self.pending:
            total = sums.setdefault(expression.key, [0.0, 0.0])
            total[0] += expression.depth
            total[1] += 1
            open_inputs = [x for x in expression.inputs if x.value is None]
            waiting[id(expression)] = len(open_inputs)
            for x in open_inputs:
                readers.setdefault(id(x), []).append(expression)
            if not open_inputs:
                ready.setdefault(expression.key, []).append(expression)
        while ready:
            key = min(ready, key=lambda key: sums[key][0] / sums[key][1])
            batch = ready.pop(key)
            sums[key][0] -= sum(expression.depth for expression in batch)
            sums[key][1] -= len(batch)
            self._run(batch)
            for expression in batch:
                for reader in readers.get(id(expression), ()):
                    waiting[id(reader)] -= 1
                    if not waiting[id(reader)]:
                        ready.setdefault(reader.key, []).append(reader)
        self.pending = []
        return [x.value[0][x.value[1]] for x in wanted if x.value is not None]

    def _run(self, batch: list[Expression]) -> None:
        """One batched launch."""
        self.launches += 1
        columns = list(zip(*(expression.inputs for expression in batch), strict=True))
        rows = [gather([x.value for x in column if x.value is not None]) for column in columns]
        if batch[0].static is not None:
            rows.append(torch.tensor([expression.static for expression in batch]))
        result = batch[0].function(*rows)
        for row, expression in enumerate(batch):
            expression.value = result, row


def gather(places: Sequence[tuple[Tensor, int]]) -> Tensor:
    """The rows at these places: a view where they are neighbours, else a copy."""
    source, first = places[0]
    if any(result is not source for result, _ in places):
        return torch.stack([result[row] for result, row in places])
    rows = [row for _, row in places]
    if rows == list(range(first, first + len(rows))):
        return source[first : first + len(rows)]
    return source[torch.tensor(rows)]


class AgendaTreeLSTM(nn.Module):
    """benchmarks.models.TreeLSTM, function by function; shares its parameters."""

    def __init__(self, model: TreeLSTM) -> None:
        super().__init__()
        self.model = model

    def loss(self, trees: Sequence[Node]) -> Tensor:
        """The sum of the losses of the trees: no dimensions."""
        batch = Agenda()
        losses: list[Expression] = []
        for tree in trees:
            found: list[Expression] = []
            self._encode(batch, tree, found)
            losses += found if self.model.all_nodes else found[-1:]
        return torch.stack(batch.values(losses)).sum()

    def _encode(self, batch: Agenda, tree: Node, losses: list[Expression]) -> tuple[Expression, Expression]:
        model = self.model
        if tree.left is None or tree.right is None:
            assert tree.word is not None
            x = batch.look_up(model.embed.weight, int(tree.word))
            gates = batch.affine(model.leaf.gates.weight, model.leaf.gates.bias, x)
            i, o, u = split(gates, 3)
            c = i.sigmoid() * u.tanh()
        else:
            hl, cl = self._encode(batch, tree.left, losses)
            hr, cr = self._encode(batch, tree.right, losses)
            gates = batch.affine(model.cell.gates.weight, model.cell.gates.bias, batch.join(hl, hr))
            i, fl, fr, o, u = split(gates, 5)
            c = i.sigmoid() * u.tanh() + fl.sigmoid() * cl + fr.sigmoid() * cr
        h = o.sigmoid() * c.tanh()
        scores = batch.affine(model.out.weight, model.out.bias, h)
        losses.append(batch.cross_entropy(scores, int(tree.label)))
        return h, c


class AgendaTagger(nn.Module):
    """examples.bilstm_tagger.Tagger, function by function; shares its parameters."""

    def __init__(self, model: Tagger) -> None:
        super().__init__()
        self.model = model

    def loss(self, sentences: Sequence[Sentence]) -> Tensor:
        """The sum of the losses of all words: no dimensions."""
        batch, model = Agenda(), self.model
        zero = batch.look_up(model.out.weight.new_zeros(1, model.left_to_right[0].hidden_size), 0)
        losses = []
        for sentence in sentences:
            vectors = [batch.look_up(model.embed.weight, int(word)) for word in sentence.words]
            for forth, back in zip(model.left_to_right, model.right_to_left, strict=True):
                left = self._states(batch, forth, zero, vectors)
                right = self._states(batch, back, zero, vectors[::-1])[::-1]
                vectors = [batch.join(*pair) for pair in zip(left, right, strict=True)]
            for vector, tag in zip(vectors, sentence.tags, strict=True):
                scores = batch.affine(model.out.weight, model.out.bias, vector)
                losses.append(batch.cross_entropy(scores, int(tag)))
        return torch.stack(batch.values(losses)).sum()

    def _states(
        self, batch: Agenda, cell: nn.LSTMCell, zero: Expression, vectors: list[Expression]
    ) -> list[Expression]:
        state: tuple[Expression, Expression] | None = None
        hidden = []
        for vector in vectors:
            h, c = state or (zero, zero)
            inputs = batch.affine(cell.weight_ih, cell.bias_ih, vector)
            i, f, g, o = split(inputs + batch.affine(cell.weight_hh, cell.bias_hh, h), 4)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            state = o.sigmoid() * c.tanh(), c
            hidden.append(state[0])
        return hidden


def split(gates: Expression, parts: int) -> list[Expression]:
    """Equal parts of a vector."""
    size = gates.shape[0] // parts
    return [gates.part(i * size, (i + 1) * size) for i in range(parts)]
