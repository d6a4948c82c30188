"""What `@autobatch` goes on, and what its calls take: methods, overridden methods, one object's method; containers."""

from __future__ import annotations

import collections
import copy
import functools
import inspect
import pickle
from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import fxbatch
from fxbatch.runtime.options import Options

XS = torch.linspace(-1, 1, 12).reshape(3, 4)


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @fxbatch.autobatch
    def forward(this, x: Tensor) -> Tensor:
        assert x.dim() == 1
        return this.linear(x).tanh()


class Child(Parent):
    @fxbatch.autobatch
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Grandchild(Child):
    def forward(self, x: Tensor) -> Tensor:  # undecorated: it takes minibatches
        return super().forward(x) + 1


def type_checked(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A decorator below `@autobatch`, as @beartype and @jaxtyped are."""

    @functools.wraps(fn)
    def check(*args: Any, **kwargs: Any) -> Tensor:
        assert all(x.dim() == 1 for x in args[1:])
        return fn(*args, **kwargs)

    return check


class CheckedParent(Parent):
    @fxbatch.autobatch
    @type_checked
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class CheckedChild(CheckedParent):
    @fxbatch.autobatch
    @type_checked
    @type_checked
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 2


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        assert x.dim() == 1
        return self.linear(x)


@pytest.mark.parametrize(
    ("kind", "scale", "shift"),
    [(Parent, 1, 0), (Child, 2, 0), (Grandchild, 2, 1), (CheckedParent, 1, 0), (CheckedChild, 2, 0)],
)
def test_a_decorated_parents_forward_is_called_for_the_instance_at_hand(
    kind: type[Parent], scale: int, shift: int
) -> None:
    model = kind()
    expected = torch.stack([torch.tanh(model.linear(x)) * scale + shift for x in XS])
    torch.testing.assert_close(model(XS), expected)
    with fxbatch.disabled():
        torch.testing.assert_close(model(XS), expected)
    # From outside it is the parent's own forward, and takes a minibatch.
    torch.testing.assert_close(Parent.forward(model, XS), torch.tanh(model.linear(XS)))


def test_the_forward_of_one_object() -> None:
    model = Plain()
    model.forward = fxbatch.autobatch(model.forward)
    torch.testing.assert_close(model(XS), model.linear(XS))
    assert fxbatch.explain(model, XS).launches_after == 1
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.linear.weight.zero_()
    torch.testing.assert_close(twin(XS), twin.linear(XS))
    assert not torch.equal(twin(XS), model(XS))
    again = pickle.loads(pickle.dumps(model))
    assert again.forward.__self__ is again
    torch.testing.assert_close(again(XS), model(XS))


def test_other_options_for_one_object() -> None:
    model = Parent()
    model.forward = fxbatch.autobatch(out="list")(model.forward)
    again = pickle.loads(pickle.dumps(model))
    assert [type(m(XS)) for m in (model, again, Parent())] == [list, list, Tensor]


class Callables:
    __slots__ = ()

    @fxbatch.autobatch
    def method(me, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    @fxbatch.autobatch
    def static(x: Tensor) -> Tensor:
        return x * 2

    @fxbatch.autobatch
    @staticmethod
    def decorated_static(x: Tensor) -> Tensor:
        return x * 2

    @classmethod
    @fxbatch.autobatch
    def of_class(cls, x: Tensor) -> Tensor:
        assert cls is Callables
        return x * 2


@pytest.mark.parametrize("name", ["method", "static", "decorated_static", "of_class"])
def test_methods_of_each_kind(name: str) -> None:
    assert torch.equal(getattr(Callables(), name)(XS), XS * 2)
    assert torch.equal(getattr(Callables(), name)(list(XS)), XS * 2)
    if name != "method":
        assert torch.equal(getattr(Callables, name)(XS), XS * 2)


async def coroutine(x: Tensor) -> Tensor:
    return x


def generator(x: Tensor) -> Any:
    yield x


@pytest.mark.parametrize(
    ("decorate", "message"),
    [
        (lambda: fxbatch.autobatch(Plain), r"on the class Plain: put it on its `def forward\(self, ...\)`"),
        (lambda: fxbatch.autobatch(Plain()), r"model\.forward = fxbatch\.autobatch\(model\.forward\)"),
        (lambda: fxbatch.autobatch(coroutine), "async function coroutine: write it without async"),
        (lambda: fxbatch.autobatch(generator), "generator generator: collect what it yields in a list"),
        (lambda: fxbatch.autobatch("depth"), "takes a function, got str"),
        (lambda: fxbatch.autobatch(shedule="depth"), "unknown option 'shedule'; did you mean 'schedule'"),
    ],
)
def test_what_can_not_be_decorated(decorate: Callable[[], Any], message: str) -> None:
    with pytest.raises(fxbatch.OptionError, match=message):
        decorate()


def test_options_are_arguments_with_the_defaults_that_hold() -> None:
    given = inspect.signature(fxbatch.autobatch).parameters
    for field in fields(Options):
        parameter = given[field.name]
        assert parameter.kind is parameter.KEYWORD_ONLY
        assert parameter.default == field.default or (not parameter.default and not field.default)
        assert f"{field.name}" in (fxbatch.autobatch.__doc__ or "")
    assert set(given) == {field.name for field in fields(Options)}


# What a minibatch may be.


class Items(Dataset[Tensor]):
    def __len__(self) -> int:
        return len(XS)

    def __getitem__(self, index: int) -> Tensor:
        return XS[index]


class Stream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(XS)


@pytest.mark.parametrize(
    "minibatch",
    [
        pytest.param(lambda: list(XS), id="list"),
        pytest.param(lambda: tuple(XS), id="tuple"),
        pytest.param(lambda: XS, id="tensor"),
        pytest.param(lambda: collections.deque(XS), id="deque"),
        pytest.param(lambda: (x for x in XS), id="generator"),
        pytest.param(lambda: map(torch.clone, XS), id="map"),
        pytest.param(Items, id="dataset"),
        pytest.param(Stream, id="iterable"),
        pytest.param(lambda: next(iter(DataLoader(Items(), batch_size=3))), id="loader"),
    ],
)
def test_containers(minibatch: Callable[[], Any]) -> None:
    model = Parent()
    torch.testing.assert_close(model(minibatch()), torch.tanh(model.linear(XS)))


@fxbatch.autobatch
def row_sum(row: dict[str, Tensor], scale: float = 1.0, mask: Tensor | None = None) -> Tensor:
    total = row["x"] * scale + row["y"]
    return total if mask is None else total * mask


def test_a_dictionary_of_columns_is_a_minibatch_of_dictionaries() -> None:
    rows = [{"x": x, "y": x + 1} for x in XS]
    batch = next(iter(DataLoader(rows, batch_size=3)))
    assert torch.equal(row_sum(batch), XS + (XS + 1))
    other_order = [rows[0], dict(reversed(rows[1].items())), rows[2]]
    assert torch.equal(row_sum(other_order), XS + (XS + 1))
    with pytest.raises(
        fxbatch.MinibatchError, match=r"'y' in it is not a column .*for a minibatch of one.*\[row\]"
    ):
        row_sum({"x": XS, "y": 1})
    with pytest.raises(fxbatch.MinibatchError, match="columns of different lengths"):
        row_sum({"x": XS, "y": XS[:2]})


def test_none_given_is_none_for_all_and_numbers_of_both_kinds_are_taken() -> None:
    rows = [{"x": x, "y": x} for x in XS]
    assert torch.equal(row_sum(rows, mask=None), XS * 2)
    assert torch.equal(
        row_sum(rows, [1, 1.5, 2], None), torch.stack([x * s + x for x, s in zip(XS, (1, 1.5, 2))])
    )


def test_arrays_give_what_iterating_them_gives() -> None:
    seen: list[Any] = []

    @fxbatch.autobatch
    def forward(x: Any) -> Tensor:
        seen.append(x)
        return torch.tensor(x) * 2

    found = forward(XS.numpy())
    assert all(type(x) is np.ndarray for x in seen)
    assert torch.equal(found, XS * 2)


class Pair(NamedTuple):
    a: Any
    b: Any


class ListTree(list):
    pass


@pytest.mark.parametrize(
    ("instance", "message"),
    [
        (3, r"Parent\.forward: x takes a minibatch.*got int: did you mean \[x\]\?"),
        ("abc", r"got str: did you mean \[x\]\?"),
        (Pair(1, 2), r"got Pair: did you mean \[x\], list\(x\) for its items\?"),
        (ListTree(["a"]), r"got ListTree: did you mean \[x\], list\(x\) for its items\?"),
        ({1, 2}, r"which has no order: list\(x\)"),
        (torch.tensor(1.0), "has no dimensions"),
    ],
)
def test_one_instance_is_no_minibatch(instance: Any, message: str) -> None:
    with pytest.raises(fxbatch.MinibatchError, match=message):
        Parent()(instance)


def test_arguments_that_the_forward_does_not_take() -> None:
    with pytest.raises(fxbatch.MinibatchError, match=r"Parent\.forward.*too many positional arguments"):
        Parent()(XS, XS)
    with pytest.raises(fxbatch.MinibatchError, match="missing a required argument: 'x'"):
        Parent()()
    with pytest.raises(fxbatch.MinibatchError, match="unexpected keyword argument 'y'"):
        Parent()(XS, y=XS)


def test_a_loaders_batch_of_columns() -> None:
    class Pairs(Plain):
        @fxbatch.autobatch
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.linear(x) * y

    model = Pairs()
    batch = next(iter(DataLoader(TensorDataset(XS, XS + 1), batch_size=3)))
    torch.testing.assert_close(model(*batch), model.linear(XS) * (XS + 1))
    with pytest.raises(fxbatch.MinibatchError, match=r"is given as \*batch"):
        model(batch)


def test_a_data_set_of_trees_with_an_optional_argument() -> None:
    class Model(Plain):
        @fxbatch.autobatch
        def forward(self, pair: tuple[Tensor, Tensor], mask: Tensor | None = None) -> Tensor:
            return self.linear(pair[0] + pair[1])

    model = Model()
    pairs = [(x, x) for x in XS]
    data = fxbatch.TracedDataset(model, pairs)
    torch.testing.assert_close(model([data[0], data[1], data[2]]), model(pairs))


# Names, exports, explanations of a model that has run.


def test_the_package_behind_the_function_trace_is_found() -> None:
    import fxbatch.trace.modules as found  # this very statement used to fail

    assert fxbatch.trace.modules is found
    assert len(fxbatch.trace(Parent(), XS[0]).sig) > 0


@pytest.mark.filterwarnings("ignore")  # torch's, about tracing and deprecation
def test_exports_are_of_the_loop() -> None:
    model = Parent()
    expected = model(XS)
    exported, traced = torch.export.export(model, (XS,)).module(), torch.jit.trace(model, XS)
    torch.testing.assert_close(exported(XS), expected)
    torch.testing.assert_close(traced(XS), expected)
    with pytest.raises(Exception, match="strict=False"):
        torch.export.export(model, (XS,), strict=True)
    torch.testing.assert_close(model(XS), expected)


def test_explain_uses_what_the_model_has_built() -> None:
    model = Parent()
    model(XS).sum().backward()
    engine = model.__dict__["_fxbatch_engines"]
    built = len(next(iter(engine.values())).operations)
    assert built > 0
    found = fxbatch.explain(model, XS)
    assert (len(engine), len(next(iter(engine.values())).operations)) == (1, built)
    assert found.launches_after <= fxbatch.explain(model, XS, schedule="none").launches_after


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda h: h.data_ptr() and h, "asks for the memory"),
        (lambda h: torch.Tensor.data_ptr(h) and h, "asks for the memory"),
        (lambda h: h.as_subclass(nn.Parameter), "can't become a Parameter"),
    ],
)
def test_what_a_value_is_not_is_said_in_words_of_the_user(use: Callable[[Tensor], Any], message: str) -> None:
    model = Plain()
    with pytest.raises(fxbatch.TraceError, match=message):
        fxbatch.autobatch(shared=("m",))(lambda m, x: use(m.linear(x)))(model, XS)
