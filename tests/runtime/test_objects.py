"""Results that are objects: dataclasses, named tuples, slots, own classes, with tensors wherever."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node

import fxbatch
from fxbatch.runtime.strategy import AdaptiveSwitch, Choice, Strategy

XS = torch.linspace(-1, 1, 12).reshape(3, 4)


class Named(NamedTuple):
    h: Tensor
    n: int


@dataclasses.dataclass(frozen=True)
class Frozen:
    h: Tensor
    name: str = "x"


class Own:
    def __init__(self, h: Tensor) -> None:
        self.h = h
        self.parts: list[Any] = [h + 1, {"c": (h * 2, 3)}]
        self.inner = Frozen(h - 1)


class Slots:
    __slots__ = ("h", "unset")

    def __init__(self, h: Tensor) -> None:
        self.h = h


class Registered:
    def __init__(self, h: Tensor) -> None:
        self.h = h


register_pytree_node(Registered, lambda x: ([x.h], None), lambda parts, _: Registered(parts[0]))  # type: ignore[arg-type]


class Model(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.make = make

    @fxbatch.autobatch
    def forward(self, x: Tensor) -> Any:
        return self.make(self.linear(x))

    @fxbatch.autobatch(out="list")
    def each(self, x: Tensor) -> Any:
        return self.make(self.linear(x))


def tensors(x: Any) -> list[Tensor]:
    """The tensors in an object, in order."""
    if isinstance(x, Tensor):
        return [x]
    if isinstance(x, dict):
        return [t for part in x.values() for t in tensors(part)]
    if isinstance(x, (list, tuple)):
        return [t for part in x for t in tensors(part)]
    names = [*getattr(x, "__dict__", ()), *[s for s in getattr(x, "__slots__", ()) if hasattr(x, s)]]
    return [t for name in names for t in tensors(getattr(x, name))]


MAKES = [
    lambda h: Named(h, 2),
    Frozen,
    Own,
    Slots,
    Registered,
    lambda h: {"a": [Frozen(h), h]},
    lambda h: Frozen(h, name=Slots(h * 3)),  # type: ignore[arg-type]
]


@pytest.mark.parametrize("make", MAKES)
def test_objects_are_those_of_the_loop(make: Callable[[Tensor], Any]) -> None:
    model = Model(make)
    with fxbatch.disabled():
        stacked, listed = model(XS), model.each(XS)
    found, each = model(XS), model.each(XS)
    assert type(found) is type(stacked) is type(listed[0]) is type(each[0])
    assert [type(t) for t in tensors(each)] == [Tensor] * len(tensors(listed)), "no values are left"
    torch.testing.assert_close(tensors(each), tensors(listed))
    torch.testing.assert_close(tensors(found), tensors(stacked))
    gradients = []
    for result in (found, each, listed):
        loss = sum(t.square().sum() for t in tensors(result) if t.requires_grad)
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))  # type: ignore[arg-type]
    torch.testing.assert_close(gradients[0], gradients[2])
    torch.testing.assert_close(gradients[1], gradients[2])


def test_what_is_shared_stays_shared_and_what_refers_to_itself_is_filled() -> None:
    def make(h: Tensor) -> Any:
        x = Slots(h)
        x.unset = [x, x.h]
        return x

    model = Model(make)
    for x in model.each(XS):
        assert x.unset[0] is x
        assert x.unset[1] is x.h
        assert type(x.h) is Tensor
    with pytest.raises(fxbatch.ResultError, match=r'Slots can\'t be stacked by attribute: .*use out="list"'):
        model(XS)


def test_values_written_on_the_instances_own_tree_become_tensors() -> None:
    model = Model(lambda h: h)
    trees = [Slots(x) for x in XS]

    @fxbatch.autobatch(out="list", shared=("model",))
    def annotate(model: Model, tree: Slots) -> Slots:
        tree.h = model.linear(tree.h)
        return tree

    found = annotate(model, trees)
    assert found == trees
    torch.testing.assert_close(torch.stack([t.h for t in trees]), model.linear(XS))


def test_torchs_own_objects_are_listed_but_not_stacked() -> None:
    model = Model(lambda h: torch.distributions.Normal(h, 1.0, validate_args=False))
    torch.testing.assert_close(model.each(XS)[1].loc, model.linear(XS[1]))
    with pytest.raises(fxbatch.ResultError, match="register_pytree_node"):
        model(XS)


def test_dictionaries_in_another_order_and_numbers_of_two_kinds() -> None:
    turn = iter(range(99))

    def make(h: Tensor) -> Any:
        odd = next(turn) % 2
        return ({"b": h + 1, "a": h} if odd else {"a": h, "b": h + 1}), 1 if odd else 2.5

    model = Model(make)
    found, numbers = model(XS)
    torch.testing.assert_close(found, {"a": model.linear(XS), "b": model.linear(XS) + 1})
    assert numbers.tolist() == [2.5, 1.0, 2.5]


def test_objects_without_tensors_are_a_list_and_unlike_ones_an_error() -> None:
    turn = iter(range(99))
    listed = Model(lambda h: (h, Named(1, "x"), Slots(next(turn))))(XS)  # type: ignore[arg-type]
    assert [x.h for x in listed[2]] == [0, 1, 2]
    model = Model(lambda h: Frozen(h) if next(turn) % 2 else Slots(h))
    with pytest.raises(fxbatch.ResultError, match=r"different structure.*use out=\"list\""):
        model(XS)
    assert {type(x) for x in model.each(XS)} == {Frozen, Slots}


def test_a_shape_among_the_results_is_a_tuple_whichever_way_an_instance_ran(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(AdaptiveSwitch, "on", True)
    monkeypatch.setattr(Strategy, "choose", lambda *_, **__: Choice(True, 2))  # the loop runs two instances
    linear = nn.Linear(4, 4)

    @fxbatch.autobatch
    def forward(x: Tensor) -> Any:
        h = linear(x[0])
        return h, h.shape

    assert [x.tolist() for x in forward([torch.randn(n, 4) for n in (2, 3, 1)])[1]] == [[4, 4, 4]]


def test_unlike_structures_are_named_in_words() -> None:
    turn = iter(range(99))
    model = fxbatch.autobatch(lambda h: (h, {"n": 1}) if next(turn) == 2 else None, adaptive=False)
    with pytest.raises(
        fxbatch.ResultError, match=r"instance 0 gave None, instance 2 gave \(a tensor, {'n': 1}\)"
    ):
        model(list(XS))


def test_an_instance_whose_result_is_an_object_is_not_traced_ahead() -> None:
    model = Model(Frozen)
    data = fxbatch.TracedDataset(model, list(XS))
    assert "holds values in an object" in data[0].reason
    torch.testing.assert_close(model([data[i] for i in range(3)]).h, model.linear(XS))
