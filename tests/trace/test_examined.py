"""What is known of a module lasts until the module changes, whatever changes in it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fxbatch.trace.module_state import Examined, unchanged


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5))
        self.register_buffer("scale", torch.ones(4))
        self.register_parameter("extra", None)
        self.table = torch.zeros(2, 3)
        self.count = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale + self.table.sum()


def _replace_numbers(m: Cell) -> None:
    m.scale.data = torch.ones(5)


def _give(name: str, value: Callable[[], object]) -> Callable[[Cell], None]:
    return lambda m: setattr(m, name, value())


CHANGES: dict[str, Callable[[Cell], object]] = {
    "mode": lambda m: m.eval(),
    "mode of a part": lambda m: m.inner[1].eval(),
    "dtype": lambda m: m.double(),
    "dtype of a part": lambda m: m.inner[0].half(),
    "device": lambda m: m.to("meta"),
    "shape under the same tensor": _replace_numbers,
    "parameter in place of nothing": _give("extra", lambda: nn.Parameter(torch.ones(1))),
    "nothing in place of a parameter": lambda m: setattr(m.inner[0], "bias", None),
    "parameter of another shape": lambda m: setattr(m.inner[0], "weight", nn.Parameter(torch.ones(4, 2))),
    "new buffer": lambda m: m.inner.register_buffer("new", torch.ones(1)),
    "attribute of another shape": _give("table", lambda: torch.zeros(3, 3)),
    "attribute that becomes a tensor": _give("count", lambda: torch.zeros(1)),
    "attribute that is a tensor no more": _give("table", lambda: 3),
    "new attribute": _give("more", lambda: torch.zeros(1)),
    "deleted attribute": lambda m: delattr(m, "table"),
    "another module of the same type": lambda m: m.inner.__setitem__(1, nn.Dropout(0.5)),
    "new module": lambda m: m.inner.append(nn.Linear(4, 4)),
    "hook": lambda m: m.register_forward_hook(lambda *_: None),
    "hook on a part": lambda m: m.inner[0].register_forward_pre_hook(lambda *_: None),
    "full backward hook": lambda m: m.inner[0].register_full_backward_hook(lambda *_: None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str) -> None:
    m = Cell()
    found = Examined(m)
    assert unchanged(found.places)
    CHANGES[change](m)
    assert not unchanged(found.places)
    again = Examined(m)
    assert unchanged(again.places) or again.reason


def test_numbers_and_gradients_are_no_change() -> None:
    m = Cell()
    found = Examined(m)
    with torch.no_grad():
        m.inner[0].weight.add_(1)
    m.requires_grad_(False)
    m.count = 2
    assert unchanged(found.places)
    m.inner[0].weight = nn.Parameter(
        torch.zeros(4, 3)
    )  # the same type: looked at again, and the same operation
    assert not unchanged(found.places)
    assert found.key == Examined(m).key


def test_what_is_no_operation_is_looked_at_again() -> None:
    hooked, coupled = Cell(), nn.BatchNorm1d(3)
    hooked.register_forward_hook(lambda *_: None)
    assert not unchanged(Examined(hooked).places)
    assert not unchanged(Examined(coupled).places)
    assert unchanged(Examined(coupled.eval()).places)


def test_modules_that_list_their_parts_themselves_are_looked_at_again() -> None:
    class Listing(Cell):
        def named_modules(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            yield "", self

    assert not unchanged(Examined(Listing()).places)
