"""Forwards that take objects, as users of graph libraries write them: packed by their attributes."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import pytest
import torch
from torch import nn

import fxbatch
from fxbatch.runtime import argument_objects, packed_forward
from tests.oracle import check_equal
from tests.ragged.test_packed_forward import variants_of

Graph = Any


class Data:
    """A graph as users hold it, with what no forward reads."""

    def __init__(self, n: int, **more: Any) -> None:
        self.x = torch.randn(n, 8, dtype=torch.float64)
        self.edge_index = torch.randint(max(n, 1), (2, 2 * n if n > 1 else 0))
        self.edge_attr = torch.randn(self.edge_index.shape[1], 8, dtype=torch.float64)
        self.y = torch.randn(1, dtype=torch.float64)
        self.__dict__.update(more)

    @property
    def num_nodes(self) -> int:
        return self.x.shape[0]


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    edge_index: torch.Tensor
    edge_attr: torch.Tensor


@dataclasses.dataclass(slots=True)
class Slotted:
    x: torch.Tensor
    edge_index: torch.Tensor
    edge_attr: torch.Tensor


def as_kind(kind: Any) -> Any:
    def make(n: int) -> Any:
        d = Data(n)
        return kind(x=d.x, edge_index=d.edge_index, edge_attr=d.edge_attr)

    return make


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.message, self.out = nn.Linear(16, 8), nn.Linear(8, 3)
        self.double()

    def encode(self, data: Graph) -> torch.Tensor:
        source, target = data.edge_index
        m = torch.relu(self.message(torch.cat([data.x[source], data.edge_attr], 1)))
        return data.x.index_add(0, target, m)

    @fxbatch.autobatch(adaptive=False)
    def forward(self, data: Graph) -> torch.Tensor:
        return self.out(self.encode(data).sum(0))


SIZES = ((4, 7, 2, 5), (3, 1, 6), (5, 5, 3))


@pytest.mark.parametrize("make", [Data, as_kind(Frozen), as_kind(Slotted), as_kind(types.SimpleNamespace)])
def test_objects_are_packed(make: Any) -> None:
    model = Net()
    for sizes in SIZES:
        check_equal(model, [make(n) for n in sizes])
    assert len(variants_of(model)) == 1 and variants_of(model)[0].calls == 6


def test_what_no_code_names_may_differ() -> None:
    model = Net()
    for sizes in SIZES:
        batch = [Data(n, name=f"molecule {n}", tags=[object()], index=n) for n in sizes]
        del batch[0].y
        check_equal(model, batch)
    assert len(variants_of(model)) == 1 and variants_of(model)[0].calls == 6


def test_attributes_that_code_names_are_compared() -> None:
    class Scaled(Net):
        @fxbatch.autobatch(adaptive=False)
        def forward(self, data: Graph) -> torch.Tensor:
            return self.out(self.encode(data).sum(0) * data.scale / data.num_nodes)

    model = Scaled()
    for scale in (1.0, 2.0):
        check_equal(model, [Data(n, scale=scale) for n in (4, 7, 2)])
    assert len(variants_of(model)) == 2
    check_equal(model, [Data(n, scale=float(n)) for n in (4, 7, 2)])
    assert len(variants_of(model)) == 2  # recorded: numbers that differ are no constants


def test_an_attribute_that_may_be_missing() -> None:
    class Maybe(Net):
        @fxbatch.autobatch(adaptive=False)
        def forward(self, data: Graph) -> torch.Tensor:
            h = self.encode(data)
            return self.out((h * data.weight[:, None] if hasattr(data, "weight") else h).sum(0))

    model = Maybe()
    check_equal(model, [Data(n) for n in (4, 7, 2)])
    weighted = [Data(n, weight=torch.rand(n, dtype=torch.float64)) for n in (4, 7, 2)]
    check_equal(model, weighted)
    assert sum(v.calls for v in variants_of(model)) == 4
    check_equal(model, [*weighted, Data(3)])
    assert sum(v.calls for v in variants_of(model)) == 4


def test_code_of_the_class_is_part_of_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counted(Net):
        @fxbatch.autobatch(adaptive=False)
        def forward(self, data: Graph) -> torch.Tensor:
            return self.out(self.encode(data).sum(0) / data.num_nodes)

    model = Counted()
    check_equal(model, [Data(n) for n in (4, 7, 2)])
    monkeypatch.setattr(Data, "num_nodes", property(lambda self: self.x.shape[0] + 1))
    check_equal(model, [Data(n) for n in (4, 7, 2)])
    assert len(variants_of(model)) == 2


def test_objects_inside_objects_and_dictionaries() -> None:
    class Both(Net):
        @fxbatch.autobatch(adaptive=False)
        def forward(self, pair: Graph, also: Graph = None) -> torch.Tensor:
            a, b = (self.encode(g).sum(0) for g in (pair["left"], pair["more"].inner[0]))
            return self.out(a - b + self.encode(also).mean(0))

    model = Both()
    for sizes in SIZES:
        pairs = [{"left": Data(n), "more": types.SimpleNamespace(inner=(Data(n + 1),))} for n in sizes]
        check_equal(model, pairs, [Data(n + 2) for n in sizes])
    assert variants_of(model)[0].calls == 6


@pytest.mark.parametrize("kind", ["object", "dictionary"])
def test_a_forward_that_changes_what_it_was_given_is_recorded(kind: str) -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(8, 3).double()

        @fxbatch.autobatch(adaptive=False)
        def forward(self, data: Graph) -> torch.Tensor:
            if isinstance(data, dict):
                data["rows"] = len(data["x"])
                return self.out(data["x"]).mean(0)
            data.rows = len(data.x)
            return self.out(data.x).mean(0)

    model = Writes()
    batch = [Data(n) if kind == "object" else {"x": Data(n).x} for n in (4, 7, 2)]
    model(batch)
    assert [b["rows"] if isinstance(b, dict) else b.rows for b in batch] == [4, 7, 2]
    assert not variants_of(model)


def test_objects_of_other_structures_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Tree:
        def __init__(self, depth: int) -> None:
            self.h = torch.randn(8, dtype=torch.float64)
            self.children = [Tree(depth - 1) for _ in range(2)] if depth else []

    class Sum(Net):
        def over(self, tree: Tree) -> torch.Tensor:
            return tree.h + sum(self.over(t).sum() for t in tree.children)

        @fxbatch.autobatch(adaptive=False)
        def forward(self, tree: Tree) -> torch.Tensor:
            return self.out(self.over(tree))

    model = Sum()
    for _ in range(6):
        trees = [Tree(d) for d in (1, 2, 0)]
        check_equal(model, trees)
    monkeypatch.setattr(packed_forward, "opened", lambda *args: pytest.fail("looked through once more"))
    check_equal(model, [Tree(d) for d in (2, 1)])


def test_of_a_tree_the_root_is_looked_at_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pair:
        def __init__(self, depth: int) -> None:
            self.word = None if depth else torch.tensor(3)
            self.left = Pair(depth - 1) if depth else None
            self.right = Pair(depth - 1) if depth else None

    class Many:
        def __init__(self, depth: int) -> None:
            self.word, self.label = torch.tensor(3), 1
            self.children = [Many(depth - 1) for _ in range(3)] if depth else []

    looks: list[Any] = []
    plain = argument_objects.attributes_of

    def looked_at(x: Any, known: argument_objects.DataClass) -> dict[str, Any]:
        looks.append(x)
        return plain(x, known)

    monkeypatch.setattr(argument_objects, "attributes_of", looked_at)
    for kind in (Pair, Many):
        for depth in (0, 1, 4):
            looks.clear()
            tree = kind(depth)
            assert not argument_objects.holds_tensors(tree)
            assert looks == [tree]
    root = Pair(2)
    root.state = torch.zeros(3)  # type: ignore[attr-defined]
    assert argument_objects.holds_tensors(root)
    assert argument_objects.holds_tensors(types.SimpleNamespace(graph=Data(3), name="a"))
