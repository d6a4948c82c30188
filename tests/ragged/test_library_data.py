"""Objects as torch_geometric's `Data`: packed by what their dictionaries hold."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ragged.test_library_style_models import check_in_double
from tests.ragged.test_packed_forward import route_of, variants_of
from tests.trust.programs import model

NAME = "torch_geometric.data.data"


@pytest.fixture
def data(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stand-in's class, of a module of the library's name."""
    module = types.ModuleType(NAME)
    monkeypatch.setitem(sys.modules, NAME, module)
    exec(compile((Path(__file__).parent / "library_data.py").read_text(), NAME, "exec"), module.__dict__)
    return module.Data


def graphs(data: Any, *sizes: int, **more: Any) -> list[Any]:
    return [
        data(
            x=torch.randn(n, 8, dtype=torch.float64), edge_index=torch.randint(max(n, 1), (2, 2 * n)),
            y=torch.randn(1, dtype=torch.float64), smiles="C" * n, idx=n, **more,
        )
        for n in sizes
    ]  # fmt: skip


def parts() -> dict[str, Any]:
    return {"message": nn.Linear(8, 8).double(), "out": nn.Linear(8, 3).double()}


def network(self: Any, g: Any) -> torch.Tensor:
    source, target = g.edge_index
    h = g.x if g.batch is None else g.x * 2
    h = h.index_add(0, target, torch.relu(self.message(h[source])))
    return self.out(h.sum(0) / g.num_nodes)


def test_objects_of_a_library_are_packed(data: Any) -> None:
    made = model(network, parts(), adaptive=False, out="list")
    for sizes in ((4, 7, 2, 5), (3, 1, 6), (5, 5, 3)):
        check_in_double(made, graphs(data, *sizes), gradients=True)
    assert len(variants_of(made)) == 1


def test_what_a_library_object_holds_is_read_as_it_is(data: Any) -> None:
    made = model(network, parts(), adaptive=False, out="list")
    check_in_double(made, graphs(data, 4, 7, 2), gradients=True)
    batched = [
        data(**g.to_dict(), batch=torch.zeros(len(g.x), dtype=torch.int64)) for g in graphs(data, 3, 6, 2)
    ]
    check_in_double(made, batched, gradients=True)
    assert len(variants_of(made)) == 2
    plain = [data(**g.to_dict(), num_nodes=2 * len(g.x)) for g in graphs(data, 3, 6, 2)]
    check_in_double(made, plain, gradients=True)  # a number that differs, and is read: a size
    assert len(variants_of(made)) == 3


@pytest.mark.parametrize(
    "read",
    [
        lambda g: len(g.smiles), lambda g: g["idx"], lambda g: sum(len(str(g[k])) for k in g.to_dict()),
        lambda g: getattr(g, "idx", 0), lambda g: 3.0 if g["smiles"] == "CCC" else 1.0, lambda g: len(g.to_dict()),
    ],
)  # fmt: skip
def test_what_is_no_tensor_is_the_instances_own(data: Any, read: Any) -> None:
    made = model(lambda self, g: network(self, g) * read(g), parts(), adaptive=False, out="list")
    for sizes in ((4, 3, 2, 5), (3, 1, 6)):
        check_in_double(made, graphs(data, *sizes), gradients=True)


def test_a_library_object_that_is_changed_is_changed(data: Any) -> None:
    def writing(self: Any, g: Any) -> torch.Tensor:
        g.x = torch.relu(self.message(g.x))
        return self.out(g.x.sum(0))

    made = model(writing, parts(), adaptive=False, out="list")
    given = graphs(data, 4, 3, 2)
    before = [g.x for g in given]
    made(given)
    assert all(g.x is not x for g, x in zip(given, before, strict=True))
    assert route_of(made).code.reason or not variants_of(made)
