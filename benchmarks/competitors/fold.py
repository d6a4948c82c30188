"""TorchFold's algorithm, from its published description: calls by depth, run method by method.

In: calls of a module's methods, one instance after the other; each method takes and gives rows `[n, ...]`.
Out: batched results. Literally: a call's depth is one more than its deepest argument's; calls of one method
at one depth run together; arguments are put together row by row with `cat`, results taken apart with `chunk`.
There is no shape in its key: one method's arguments must all be of one type.

    fold = Fold()
    nodes = [[fold.add("leaf", fold.add("embed", 17))[0]], ...]
    (rows,) = fold.apply(model, nodes)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.models import Node, TreeLSTM


@dataclass(frozen=True)
class Call:
    """A call: method, depth, place among the calls of both; `output` picks one of several results."""

    method: str
    depth: int
    place: int
    output: int = -1

    def __getitem__(self, output: int) -> Call:
        return Call(self.method, self.depth, self.place, output)


class Fold:
    """Records calls, then runs them depth by depth."""

    def __init__(self) -> None:
        self.depths: dict[int, dict[str, list[tuple[Any, ...]]]] = {}

    def add(self, method: str, *arguments: Any) -> Call:
        """Record a call; arguments are earlier calls or Python ints."""
        depth = max((argument.depth + 1 for argument in arguments if isinstance(argument, Call)), default=0)
        calls = self.depths.setdefault(depth, {}).setdefault(method, [])
        calls.append(arguments)
        return Call(method, depth, len(calls) - 1)

    def apply(self, module: Any, results: Sequence[Sequence[Call]]) -> list[Tensor]:
        """Run all calls; each list of calls in `results` becomes one tensor of rows."""
        values: dict[int, dict[str, Any]] = {}
        for depth in sorted(self.depths):
            values[depth] = {}
            for method, calls in self.depths[depth].items():
                columns = [self._rows(column, values, module) for column in zip(*calls, strict=True)]
                found = getattr(module, method)(*columns)
                parts = (
                    tuple(x.chunk(len(calls)) for x in found)
                    if isinstance(found, tuple)
                    else found.chunk(len(calls))
                )
                values[depth][method] = parts
        return [self._rows(calls, values, module) for calls in results]

    def _rows(self, column: Sequence[Any], values: dict[int, dict[str, Any]], module: Any) -> Tensor:
        if not isinstance(column[0], Call):
            return torch.tensor(column, device=module.device)
        parts = []
        for call in column:
            found = values[call.depth][call.method]
            parts.append(found[call.place] if call.output < 0 else found[call.output][call.place])
        return torch.cat(parts)


class FoldTreeLSTM(nn.Module):
    """benchmarks.models.TreeLSTM over Fold; shares its parameters."""

    def __init__(self, model: TreeLSTM) -> None:
        super().__init__()
        self.model = model

    @property
    def device(self) -> torch.device:
        """Where the parameters are."""
        return self.model.out.weight.device

    def embed(self, words: Tensor) -> Tensor:
        return self.model.embed(words)

    def leaf(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.leaf(x)

    def node(self, hl: Tensor, cl: Tensor, hr: Tensor, cr: Tensor) -> tuple[Tensor, Tensor]:
        return self.model.cell(hl, cl, hr, cr)

    def classify(self, h: Tensor) -> Tensor:
        return self.model.out(h)

    def forward(self, trees: Sequence[Node]) -> Tensor:
        """Scores `[trees, classes]` of the roots."""
        fold = Fold()
        return fold.apply(self, [[self._record(fold, tree, [])[1] for tree in trees]])[0]

    def loss(self, trees: Sequence[Node]) -> Tensor:
        """The sum of the losses of the trees: no dimensions."""
        fold, scored, labels = Fold(), [], []
        for tree in trees:
            found: list[tuple[Call, Tensor]] = []
            self._record(fold, tree, found)
            wanted = found if self.model.all_nodes else found[-1:]
            scored += [call for call, _ in wanted]
            labels += [label for _, label in wanted]
        return F.cross_entropy(fold.apply(self, [scored])[0], torch.stack(labels), reduction="sum")

    def _record(self, fold: Fold, tree: Node, found: list[tuple[Call, Tensor]]) -> tuple[Call, Call]:
        if tree.left is None or tree.right is None:
            assert tree.word is not None
            state = fold.add("leaf", fold.add("embed", int(tree.word)))
        else:
            left, right = self._record(fold, tree.left, found)[0], self._record(fold, tree.right, found)[0]
            state = fold.add("node", left[0], left[1], right[0], right[1])
        scores = fold.add("classify", state[0])
        found.append((scores, tree.label))
        return state, scores
