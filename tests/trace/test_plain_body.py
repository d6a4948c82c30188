"""An operation is kept by all that its code reads; a body that changes what outlives it is traced through."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import math
import operator
import re
import threading
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxbatch
from fxbatch.errors import TraceError
from fxbatch.trace.module_state import MANY_STATES
from fxbatch.trace.places import first_changed
from fxbatch.trace.reads import Reads
from tests.oracle import check_equal
from tests.trace import tagger
from tests.trace.made import value

SCALE = 2.0
TABLE = {"scale": 2.0}
SETTINGS = types.SimpleNamespace(scale=2.0, other=1)
module_like = types.ModuleType("module_like")
module_like.scale = 2.0  # type: ignore[attr-defined]


def twice(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


class Kind(enum.Enum):
    TWICE = 2
    THRICE = 3


@dataclasses.dataclass
class Config:
    scale: float = 2.0
    layers: list[float] = dataclasses.field(default_factory=lambda: [2.0, 1.0])

    def factor(self) -> float:
        return self.scale


class Sub(nn.Module):
    """One operation whose body is given by the test."""

    of_class = 2.0

    def __init__(self, body: Callable[[Any, torch.Tensor], torch.Tensor], **attributes: Any) -> None:
        super().__init__()
        self.body = body
        for name, x in attributes.items():
            setattr(self, name, x)

    @property
    def doubled(self) -> float:
        return self.scale * 2

    def factor(self) -> float:
        return self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self, x)


class Model(nn.Module):
    def __init__(self, sub: nn.Module) -> None:
        super().__init__()
        self.sub = sub

    @fxbatch.autobatch
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.sub(value(x))


def check(model: nn.Module, x: torch.Tensor | None = None) -> None:
    """Batched is the loop, to the last bit: the bodies here are pointwise."""
    x = torch.arange(1.0, 9.0).reshape(4, 2) if x is None else x
    with fxbatch.disabled():
        expected = model(x)
    assert torch.equal(model(x), expected)


def engine(model: Any) -> Any:
    return type(model).forward.__fxbatch__.engine(model)


def through(model: Any) -> list[str]:
    return [t.reason for t in engine(model).table.traced_through.values()]


def _set_global(name: str, value: Any) -> None:
    globals()[name] = value


def _closure() -> tuple[Sub, Callable[[], None]]:
    scale = 2.0

    def body(self: Any, x: torch.Tensor) -> torch.Tensor:
        return x * scale

    def change() -> None:
        nonlocal scale
        scale = 3.0

    return Sub(body), change


def _with(
    body: Callable[[Any, torch.Tensor], torch.Tensor], change: Callable[[Any], Any], **attributes: Any
) -> Any:
    def make() -> tuple[Sub, Callable[[], Any]]:
        sub = Sub(body, **attributes)
        return sub, lambda: change(sub)

    return make


def _through_a_tuple(self: Any, x: torch.Tensor) -> torch.Tensor:
    for part in (self.first, self.second):
        x = part(x) * part.scale
    return x


def _through_pairs(self: Any, x: torch.Tensor) -> torch.Tensor:
    for part, factor in [(self.first, 2.0), (self.second, 3.0)]:
        x = part(x) * factor
    return x


def _of_parts(
    body: Callable[[Any, torch.Tensor], torch.Tensor],
) -> Callable[[], tuple[Sub, Callable[[], Any]]]:
    def make() -> tuple[Sub, Callable[[], Any]]:
        first, second = (Sub(lambda self, x: x + self.scale, scale=s) for s in (1.0, 2.0))
        return Sub(body, first=first, second=second), lambda: setattr(second, "scale", 5.0)

    return make


CHANGES: dict[str, Callable[[], tuple[nn.Module, Callable[[], Any]]]] = {
    "attribute": _with(lambda self, x: x * self.scale, lambda m: setattr(m, "scale", 3.0), scale=2.0),
    "attribute, past setattr": _with(
        lambda self, x: x * self.scale, lambda m: m.__dict__.__setitem__("scale", 3.0), scale=2.0
    ),
    "type of a number": _with(lambda self, x: x.long() // self.n, lambda m: setattr(m, "n", 2.0), n=2),
    "item of a list": _with(
        lambda self, x: x * self.scales[0], lambda m: m.scales.__setitem__(0, 3.0), scales=[2.0, 1.0]
    ),
    "item of a dict in a tuple": _with(
        lambda self, x: x * self.all[0]["a"], lambda m: m.all[0].update(a=3.0), all=({"a": 2.0},)
    ),
    "array": _with(
        lambda self, x: x * float(self.a[1]), lambda m: m.a.__setitem__(1, 3.0), a=np.array([1.0, 2.0])
    ),
    "deque": _with(
        lambda self, x: x * self.q[0], lambda m: m.q.appendleft(3.0), q=collections.deque([2.0])
    ),
    "config object": _with(lambda self, x: x * self.c.scale, lambda m: setattr(m.c, "scale", 3.0), c=Config()),
    "method of a config object": _with(
        lambda self, x: x * self.c.factor(), lambda m: setattr(m.c, "scale", 3.0), c=Config()
    ),
    "another config object": _with(
        lambda self, x: x * self.c.scale, lambda m: setattr(m, "c", Config(3.0)), c=Config()
    ),
    "enum": _with(lambda self, x: x * self.k.value, lambda m: setattr(m, "k", Kind.THRICE), k=Kind.TWICE),
    "part in a tuple": _of_parts(_through_a_tuple),
    "part in a list of pairs": _of_parts(_through_pairs),
    "property": _with(lambda self, x: x * self.doubled, lambda m: setattr(m, "scale", 3.0), scale=2.0),
    "method": _with(lambda self, x: x * self.factor(), lambda m: setattr(m, "scale", 3.0), scale=2.0),
    "dynamic name": _with(
        lambda self, x: x * getattr(self, "sc" + "ale"), lambda m: setattr(m, "scale", 3.0), scale=2.0
    ),
    "name with a number in it": _with(
        lambda self, x: x * getattr(self, f"scale_{int(x.shape[0]) - 1}") * getattr(self, "scale_%d" % 0),  # noqa: UP031
        lambda m: setattr(m, "scale_1", 3.0), scale_0=1.0, scale_1=2.0,
    ),
    "name in an attribute": _with(
        lambda self, x: getattr(torch, self.of)(x), lambda m: setattr(m, "of", "sin"), of="cos"
    ),
    "name in an attribute, of its own": _with(
        lambda self, x: x * getattr(self, self.of), lambda m: setattr(m, "a", 5.0), of="a", a=2.0
    ),
    "attribute that is not there": _with(
        lambda self, x: x * (getattr(self, "extra", None) or 2.0), lambda m: setattr(m, "extra", 3.0)
    ),
    "attribute of the class that is not there": _with(
        lambda self, x: x * getattr(self, "of_class_later", 2.0), lambda m: setattr(Sub, "of_class_later", 3.0)
    ),
    "whether there is an attribute": _with(
        lambda self, x: x * 3 if hasattr(self, "extra") else x, lambda m: setattr(m, "extra", 3.0)
    ),
    "method by name": _with(
        lambda self, x: x * getattr(self, "fac{}".format("tor"))(), lambda m: setattr(m, "scale", 3.0), scale=2.0
    ),
    "replaced method of the object": _with(
        lambda self, x: x * self.factor(), lambda m: setattr(m, "factor", lambda: 3.0), scale=2.0
    ),
    "global": _with(lambda self, x: x * SCALE, lambda m: _set_global("SCALE", 3.0)),
    "global of a helper": _with(lambda self, x: twice(x), lambda m: _set_global("SCALE", 3.0)),
    "helper": _with(lambda self, x: twice(x), lambda m: _set_global("twice", lambda x: x * 5)),
    "global dict": _with(lambda self, x: x * TABLE["scale"], lambda m: TABLE.update(scale=3.0)),
    "global object": _with(lambda self, x: x * SETTINGS.scale, lambda m: setattr(SETTINGS, "scale", 3.0)),
    "Python module": _with(lambda self, x: x * module_like.scale, lambda m: setattr(module_like, "scale", 3.0)),
    "closure": _closure,
    "default": lambda: (Sub(_defaulted), lambda: _defaulted.__defaults__[0].update(a=3.0)),  # type: ignore[index]
    "partial": _with(lambda self, x: self.f(x), lambda m: setattr(m, "f", functools.partial(torch.mul, other=3)),
                     f=functools.partial(torch.mul, other=2)),
    "function in an attribute": _with(lambda self, x: self.f(x), lambda m: setattr(m, "f", torch.cos), f=torch.sin),
    "class attribute": _with(lambda self, x: x * self.of_class, lambda m: setattr(Sub, "of_class", 3.0)),
    "function of the class": _with(lambda self, x: x, lambda m: setattr(Sub, "forward", lambda self, x: x * 7)),
    "forward of the object": _with(lambda self, x: x, lambda m: setattr(m, "forward", lambda x: x * 7)),
    "class": _with(lambda self, x: x * 2, lambda m: setattr(m, "__class__", Other)),
    "activation by another": lambda: ((s := nn.Sequential(nn.ReLU())), lambda: s.__setitem__(0, nn.Tanh())),
    "slope": lambda: ((s := nn.LeakyReLU(0.5)), lambda: setattr(s, "negative_slope", 2.0)),
    "eps": lambda: ((s := nn.LayerNorm(2)), lambda: setattr(s, "eps", 1.0)),
    "probability": lambda: ((s := nn.Dropout(0.0)), lambda: setattr(s, "p", 1.0)),
}  # fmt: skip


def _defaulted(self: Any, x: torch.Tensor, options: Any = {"a": 2.0}) -> torch.Tensor:  # noqa: B006 - what is tested
    return x * options["a"]


class Other(Sub):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - 5


@pytest.fixture(autouse=True)
def as_before() -> Any:
    forward = Sub.forward
    yield
    Sub.of_class, Sub.forward, SETTINGS.scale, module_like.scale = 2.0, forward, 2.0, 2.0  # type: ignore[attr-defined, method-assign]
    TABLE.update(scale=2.0)
    globals().update(SCALE=2.0, twice=_TWICE)
    _defaulted.__defaults__[0].update(a=2.0)  # type: ignore[index]


_TWICE = twice


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_minibatches_is_seen(name: str) -> None:
    sub, change = CHANGES[name]()
    model = Model(sub)
    check(model)
    change()
    check(model)


PER_INSTANCE: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], Callable[[Any, float], Any], Any]] = {
    "config object": (lambda self, x: x * self.c.scale, lambda m, s: setattr(m.c, "scale", s), {"c": Config()}),
    "list": (lambda self, x: x * self.l[0], lambda m, s: m.l.__setitem__(0, s), {"l": [2.0]}),
    "global": (lambda self, x: x * SCALE, lambda m, s: _set_global("SCALE", s), {}),
    "class attribute": (lambda self, x: x * self.of_class, lambda m, s: setattr(Sub, "of_class", s), {}),
}  # fmt: skip


class PerInstance(Model):
    def __init__(self, sub: nn.Module, change: Callable[[Any, float], Any]) -> None:
        super().__init__(sub)
        self.change = change

    @fxbatch.autobatch
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.change(self.sub, float(x[0]))
        y = self.sub(x)
        self.change(self.sub, 0.5)
        return y + self.sub(x)


@pytest.mark.parametrize("name", PER_INSTANCE)
def test_a_change_while_instances_run_is_seen(name: str) -> None:
    body, change, attributes = PER_INSTANCE[name]
    model = PerInstance(Sub(body, **attributes), change)
    for _ in range(2):
        check(model, torch.tensor([[1.0, 5.0], [2.0, 5.0]]))


class SetsAttribute(Model):
    @fxbatch.autobatch
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.sub.scale = float(x[0])
        y = self.sub(x)
        self.sub.scale = 0.5
        return y + self.sub(x)


def test_an_attribute_that_instances_set_is_seen() -> None:
    model = SetsAttribute(Sub(lambda self, x: x * self.scale, scale=2.0))
    for _ in range(2):
        check(model, torch.tensor([[1.0, 5.0], [2.0, 5.0]]))


def test_code_replaced_while_instances_run_is_refused() -> None:
    def swap(m: Sub, s: float) -> None:
        m.__dict__["scale"] = s

    model = PerInstance(Sub(lambda self, x: x * self.scale, scale=2.0), swap)
    with pytest.raises(fxbatch.TraceError, match=r"self\.scale was changed while instances ran"):
        model(torch.tensor([[1.0, 5.0], [2.0, 5.0]]))


def test_values_that_come_back_build_nothing() -> None:
    model = Model(Sub(lambda self, x: x * self.scale, scale=2.0))
    for scale in (2.0, 3.0):
        model.sub.scale = scale
        check(model)
    signatures = len(engine(model).table.signatures)
    for scale in (2.0, 3.0, 2.0):
        model.sub.scale = scale
        check(model)
    assert len(engine(model).table.signatures) == signatures


def test_a_number_that_keeps_changing_becomes_an_input() -> None:
    model = Model(Sub(lambda self, x: x * self.scale, scale=0.0))
    counts = []
    for step in range(2 * MANY_STATES + 6):
        model.sub.scale = 0.125 * (step + 1)
        check(model, torch.tensor([[1.0, -2.0], [-3.0, 4.0]]))
        counts.append(len(engine(model).table.signatures))
    assert counts[-1] == counts[-3], "the last steps made signatures"
    assert any("keeps changing" in reason for reason in through(model))


def test_a_probability_that_keeps_changing() -> None:
    torch.manual_seed(0)
    model = Model(nn.Dropout(0.0))
    for step in range(11):
        model.sub.p = step / 10
        share = (model(torch.ones(64, 64)) == 0).float().mean().item()
        assert abs(share - step / 10) < 0.05


def test_an_argument_that_keeps_changing_runs_call_by_call() -> None:
    settings = {"beta": 1.0}
    model = Model(Sub(lambda self, x: x))
    model.sub.body = lambda self, x: F.layer_norm(x, (2,), eps=settings["beta"])
    for step in range(2 * MANY_STATES + 3):
        settings["beta"] = 1.0 + step / 8
        x = torch.tensor([[1.0, -2.0], [-3.0, 4.0]])
        with fxbatch.disabled():
            expected = model(x)
        torch.testing.assert_close(model(x), expected, rtol=1e-6, atol=1e-6)
    reasons = [s.reason for s in engine(model).table.signatures]
    assert reasons[-1] == "an argument of it keeps changing"


FLOATS: dict[str, Callable[[torch.Tensor, float], Any]] = {
    "add": lambda x, t: torch.add(x, x * x, alpha=t),
    "sub": lambda x, t: x.sub(x * x, alpha=t),
    "lerp": lambda x, t: torch.lerp(x, x * x, t),
    "masked_fill": lambda x, t: x.masked_fill(x > 0, t),
    "clamp_min": lambda x, t: x.clamp_min(t),
    "clamp_max": lambda x, t: torch.clamp_max(x, t),
    "mul_": lambda x, t: x.clone().mul_(t),
    "clamp_": lambda x, t: x.clone().clamp_(-t, t),
}


@pytest.mark.parametrize("name", FLOATS)
def test_floats_that_differ_build_nothing_for_each(name: str) -> None:
    function, linear = FLOATS[name], nn.Linear(4, 4)

    def one(x: torch.Tensor, t: float) -> torch.Tensor:
        return function(linear(x), t) * 1.0

    batched = fxbatch.autobatch(one)
    x = torch.randn(20, 4)
    numbers = [0.25 + i / 16 for i in range(20)]
    found = batched(list(x), numbers)
    found.sum().backward()
    gradient, linear.weight.grad = linear.weight.grad, None
    linear.double()
    expected = torch.stack([one(row.double(), t) for row, t in zip(x, numbers, strict=True)])
    expected.sum().backward()
    torch.testing.assert_close(found, expected.float(), rtol=1e-5, atol=1e-5)
    assert gradient is not None and linear.weight.grad is not None
    torch.testing.assert_close(gradient, linear.weight.grad.float(), rtol=1e-4, atol=1e-4)
    entries = batched.__fxbatch__.engine(None).operations._entries.values()  # type: ignore[attr-defined]
    assert sum(x.graphs is not None for x in entries) <= 12


# What a body changes


def test_a_list_that_a_body_appends_to() -> None:
    model = Model(Sub(_append, n=[]))
    assert torch.equal(model(torch.ones(3, 2)), torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]))
    assert model.sub.n == [1, 1, 1]
    assert any("reads self.n, a list" in reason for reason in through(model))


def _append(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.n.append(1)
    return x * len(self.n)


def _count(self: Any, x: torch.Tensor) -> torch.Tensor:
    TABLE["scale"] += 1
    return x * 2


def _count_global(self: Any, x: torch.Tensor) -> torch.Tensor:
    global SCALE
    SCALE += 1
    return x * 2


def _count_in_class(self: Any, x: torch.Tensor) -> torch.Tensor:
    Sub.of_class += 1
    return x * 2


@pytest.mark.parametrize(
    ("body", "count"),
    [
        (_count, lambda: TABLE["scale"]),
        (_count_global, lambda: SCALE),
        (_count_in_class, lambda: Sub.of_class),
    ],
)
def test_counters_count_each_call(body: Any, count: Callable[[], float]) -> None:
    model = Model(Sub(body))
    for done in (3, 6):
        model(torch.ones(3, 2))
        assert count() == 2 + done


def test_a_body_that_keeps_tensors_holds_no_fakes() -> None:
    def body(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        self.log.append(y)
        return y

    model = Model(Sub(body, log=[]))
    model(torch.ones(3, 2))
    assert len(model.sub.log) == 3
    assert not any(type(t).__name__ == "FakeTensor" for t in model.sub.log)


@pytest.mark.parametrize(
    ("body", "attributes", "reason"),
    [
        (lambda self, x: x * next(self.i), {"i": iter([1, 2, 3, 4, 5, 6])}, "which can't be compared"),
        (lambda self, x: x * _cached(2), {}, "a function that keeps its results"),
        (lambda self, x: (print(end=""), x * 2)[1], {}, "calls print()"),
        (lambda self, x: x * (2 if self.lock.acquire() and not self.lock.release() else 1), {"lock": threading.Lock()},
         "which can't be compared"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared_is_traced_through(body: Any, attributes: Any, reason: str) -> None:
    model = Model(Sub(body, **attributes))
    model(torch.ones(2, 2))
    assert any(reason in r for r in through(model)), through(model)


@functools.cache
def _cached(n: int) -> float:
    return n * 2.0


# Functions, traces, modules made on the way


class Power(torch.autograd.Function):
    scale = 2.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * Power.scale

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> Any:
        return g * Power.scale


@fxbatch.operation
def marked(x: torch.Tensor) -> torch.Tensor:
    return x * SCALE


class Calls(nn.Module):
    def __init__(self, call: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.l = nn.Identity()
        self.call = call
        self.scale = 2.0

    @fxbatch.operation
    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale

    @fxbatch.autobatch
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(self, self.l(x))


def test_marked_functions_and_custom_functions_are_kept_by_what_they_read() -> None:
    functions, custom = Calls(lambda m, x: marked(x)), Calls(lambda m, x: Power.apply(x))
    methods = Sub(lambda self, x: x)
    methods = Calls(lambda m, x: m.inner.scaled(x))
    methods.inner = Calls(lambda m, x: x)
    for scale in (2.0, 3.0, 2.0):
        _set_global("SCALE", scale)
        check(functions)
        Power.scale = scale
        check(custom)
        methods.inner.scale = scale
        check(methods)


def test_functional_call_is_kept_by_what_the_module_reads() -> None:
    model = Calls(lambda m, x: torch.func.functional_call(m.inner, {}, (x,)))
    model.inner = Sub(lambda self, x: x * self.scale, scale=2.0)
    for scale in (2.0, 3.0, 2.0):
        model.inner.scale = scale
        check(model)


@pytest.mark.parametrize("change", [lambda m: setattr(m, "scale", 3.0), lambda m: _set_global("SCALE", 3.0)])
def test_kept_traces_notice_what_the_forward_reads(change: Any) -> None:
    model = Calls(lambda m, x: x * m.scale * SCALE)
    x = torch.ones(3, 2)
    data = fxbatch.TracedDataset(model, list(x))
    traced = [data[i] for i in range(3)]
    assert all(t.trace is not None for t in traced)
    assert torch.equal(model(traced), x * 4)
    change(model)
    assert torch.equal(model(traced), x * 6)
    assert torch.equal(model([data[i] for i in range(3)]), x * 6)


def test_a_forward_that_counts_is_not_kept_and_counts_nothing_while_it_is_traced() -> None:
    def call(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.scale += 1
        return x * m.scale

    model = Calls(call)
    item = fxbatch.TracedDataset(model, [torch.ones(2)])[0]
    assert item.trace is None
    assert item.reason == "the forward changes self.scale"
    assert model.scale == 2.0


def test_modules_made_in_the_forward_are_one_operation() -> None:
    model = Calls(
        lambda m, x: nn.CrossEntropyLoss(label_smoothing=0.5)(nn.Sequential(nn.Tanh())(x), torch.tensor(1))
    )
    for _ in range(3):
        with fxbatch.disabled():
            expected = model(torch.ones(6, 2))
        torch.testing.assert_close(model(torch.ones(6, 2)), expected)
    assert len(engine(model).table.modules) <= 4
    assert len(engine(model).table.signatures) <= 6


# The walk itself


def test_keys_are_equal_for_equal_content() -> None:
    a = Sub(lambda self, x: x * self.c[0] + self.d, c=(2.0, "a"), d=1)
    first = Reads.of_module(a)
    a.c = (2.0, "ab"[:1])
    a.unread = 3
    assert first.again().key == first.key
    a.d = 2
    assert first_changed(first.items) is not None
    assert first.again().key != first.key


def test_torchs_own_modules_read_their_attributes_and_nothing_else() -> None:
    reads = Reads.of_module(nn.TransformerEncoderLayer(8, 2, 16))
    paths = {item.path for item in reads.items}
    assert {"self.norm1.eps", "self.dropout.p", "self.self_attn.num_heads", "self.activation"} <= paths
    assert not reads.opaque
    assert reads.guards() == (), "nothing that changes unseen"


# What is plain, and what is not


def reason(body: Callable[..., Any], **attributes: Any) -> str:
    return Reads.of_module(Sub(body, **attributes)).opaque


def test_a_function_without_source_is_not_plain() -> None:
    made: dict[str, Any] = {}
    exec("def body(self, x):\n    return x * 2", made)
    assert "whose source can't be had" in reason(made["body"])


class Item(NamedTuple):
    h: torch.Tensor
    c: torch.Tensor


def loops(self: Any, x: torch.Tensor) -> Any:
    outs = []
    for i, layer in enumerate(self.layers):
        x = layer(x) + i
        outs.append(x)
    for layer, out in zip(self.layers, outs, strict=True):
        x = x + layer(out)
    state = Item(x, torch.stack(outs).mean(0))
    first, *rest = [self.layers[i](x) for i in range(len(self.layers))]
    return state.h.sum() + sum(r.max(-1).values.sum() for r in rest) + first.norm() + state.c.mean()


def local_functions(self: Any, x: torch.Tensor) -> torch.Tensor:
    def twice(y: torch.Tensor, by: float = 2.0) -> torch.Tensor:
        return y * by * self.scale

    return torch.func.vmap(twice)(x[None])[0] + (lambda y, layer=self.layers[0]: layer(y))(x)


def raises(self: Any, x: torch.Tensor) -> torch.Tensor:
    if x.dim() != 1:
        raise ValueError(f"{x.shape} is no vector")
    assert isinstance(x, torch.Tensor), "a tensor"
    with torch.no_grad():
        scale = math.sqrt(np.prod(x.shape[-1:]))
    return F.relu(x) / scale if self.training else torch.tanh(x)


@pytest.mark.parametrize("body", [loops, local_functions, raises])
def test_plain_bodies(body: Any) -> None:
    layers = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
    assert not reason(body, layers=layers, scale=2.0)


def one_side_plain(self: Any, x: torch.Tensor) -> torch.Tensor:
    for layer in self.layers:
        if not self.training:
            return layer(x) * float(x.sum().detach().numpy())
        x = layer(x)
    else:
        x = x * SCALE
    if self.training:
        return x.sum()
    print(x)
    return x


def test_of_a_branch_on_the_mode_the_side_that_runs_is_walked(monkeypatch: pytest.MonkeyPatch) -> None:
    sub = Sub(one_side_plain, layers=nn.ModuleList([nn.Linear(2, 2)]))
    reads = Reads.of_module(sub)
    assert not reads.opaque
    assert "SCALE: 2.0" in reads.lines()
    assert "numpy" in Reads.of_module(sub.eval()).opaque
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert "numpy" in reads.again().opaque, "a number and the mode have changed"


@pytest.mark.parametrize("body", [_through_a_tuple, _through_pairs], ids=lambda f: f.__name__)
def test_what_goes_through_parts_in_tuples_is_plain(
    body: Callable[[Any, torch.Tensor], torch.Tensor],
) -> None:
    assert not Reads.of_module(_of_parts(body)()[0]).opaque


def test_a_mode_that_changes_is_seen() -> None:
    model = Model(Sub(one_side_plain, layers=nn.ModuleList([nn.Linear(2, 2) for _ in range(2)])))
    for mode in (True, False, True, False):
        check(model.train(mode))
    model.sub.train()  # alone
    check(model)


NOT_PLAIN: dict[str, tuple[Callable[..., Any], str]] = {
    "stores to an attribute": (lambda self, x: setattr(self, "n", 1) or x, "calls setattr()"),
    "identity": (lambda self, x: x if x is self.weight else x * 2, "one object"),
    "a tensor's history": (lambda self, x: x if x.grad_fn is None else x * 2, "asks a tensor for its grad_fn"),
    "needs a gradient": (lambda self, x: x * x.requires_grad, "requires_grad"),
    "a list with a method": (lambda self, x: x * self.sizes.index(1), "reads self.sizes.index"),
    "a list that grows": (lambda self, x: self.sizes.append(1) or x, "reads self.sizes.append"),
    "a list of the body's own list": (lambda self, x: [self.sizes][0].append(1) or x, "reads self.sizes, a list"),
    "lists that are listed": (lambda self, x: [self.sizes for _ in "ab"][1].append(1) or x, "reads self.sizes, a list"),
    "a list that a list keeps": (lambda self, x: _keeps([], self.sizes)[0].append(1) or x, "reads self.sizes, a list"),
    "a list in a tuple": (lambda self, x: (1, self.sizes)[1].append(1) or x, "append"),
    "an empty list": (lambda self, x: x * len(self.nothing), "reads self.nothing, a list"),
    "a list that is the result": (lambda self, x: (x, self.sizes), "reads self.sizes, a list"),
    "the largest of lists": (lambda self, x: x * max(self.sizes, [1])[0], "reads self.sizes, a list"),
    "a list changed by an operator": (lambda self, x: operator.iadd(self.sizes, [1]) and x, "a list"),
    "a dictionary's length": (lambda self, x: x * len(TABLE), "reads TABLE, a dict"),
    "a dictionary's keys": (lambda self, x: x * next(TABLE[k] for k in TABLE), "reads TABLE, a dict"),
    "whether a key is there": (lambda self, x: x if "scale" in TABLE else -x, "reads TABLE, a dict"),
    "whether a dictionary is empty": (lambda self, x: x if TABLE else -x, "reads TABLE, a dict"),
    "a dictionary or another": (lambda self, x: x * (TABLE or {"scale": 3})["scale"], "reads TABLE, a dict"),
    "a dictionary's items": (lambda self, x: x * next(iter(TABLE.items()))[1], "reads TABLE.items"),
    "a dictionary as arguments": (lambda self, x: _scaled(x, **TABLE), "reads TABLE, a dict"),
    "a dictionary copied": (lambda self, x: x * dict(TABLE)["scale"], "reads TABLE, a dict"),
    "a dictionary as text": (lambda self, x: x * len(f"{TABLE}"), "reads TABLE, a dict"),
    "a key that isn't there": (lambda self, x: x * TABLE.get("other", 2.0), "reads TABLE['other'], which is not there"),
    "a key of many": (lambda self, x: x * MANY_ENTRIES[len(x)], "more than 64 entries"),
    "a key set": (lambda self, x: TABLE.__setitem__("other", 1) or x, "reads TABLE.__setitem__"),
    "a default set": (lambda self, x: x * TABLE.setdefault("other", 2.0), "reads TABLE.setdefault"),
    "a dictionary of the body's own list": (lambda self, x: [TABLE][0].update(a=1) or x, "reads TABLE"),
    "a dictionary that is the result": (lambda self, x: (x, TABLE), "reads TABLE, a dict"),
    "a dictionary for torch": (lambda self, x: torch.stack([x, TABLE]), "reads TABLE, a dict"),
    "an attribute that isn't there": (lambda self, x: x * getattr(SETTINGS, "none", 2.0), "SETTINGS.none, which is"),
    "all attributes": (lambda self, x: x * vars(SETTINGS)["scale"], "reads SETTINGS, a SimpleNamespace"),
    "an object compared": (lambda self, x: x if SETTINGS == 1 else -x, "reads SETTINGS, a SimpleNamespace"),
    "an object with rules of its own": (lambda self, x: x * OWN_RULES.scale, "reads OWN_RULES, a OwnRules"),
    "an object's list": (lambda self, x: x * Config().layers[0], "a Config"),
    "an object that is set": (lambda self, x: SETTINGS.__setattr__("n", 1) or x, "reads SETTINGS.__setattr__"),
    "a module of others": (lambda self, x: ELSEWHERE(x), "a module that is not its own"),
    "called back": (lambda self, x: sorted([1, 2], key=lambda n: print(n)) and x, "calls print()"),
    "a part in a set of its own": (lambda self, x: set().add(torch.tanh) or x, "gives torch.tanh to set().add()"),
    "called back by a list's method": (lambda self, x: [1].sort(key=lambda n: print(n)) or x, "gives lambda to"),
    "a default": (lambda self, x, seen=[]: x * len(seen), "the default of seen"),
    "class of a tensor": (lambda self, x: x if type(x) is torch.Tensor else x * 2, "calls type()"),
    "the generator": (lambda self, x: x * torch.initial_seed(), "calls torch.initial_seed()"),
    "an attribute by name": (lambda self, x: x * getattr(self, "".join(["scale"])), "calls getattr()"),
    "a list by a name": (lambda self, x: getattr(self, "si" + "zes").clear() or x, "reads self.sizes.clear"),
    "a method of torch by a name": (lambda self, x: getattr(self, "ha" + "lf")() and x, "calls half() of a module"),
}  # fmt: skip
ELSEWHERE = nn.Linear(2, 2)
MANY_ENTRIES = dict.fromkeys(range(100), 2.0)
FUNCTIONS = {"twice": twice, "tanh": torch.tanh}
CONFIG = Config()


class OwnRules:
    def __getattr__(self, name: str) -> float:
        return 2.0


OWN_RULES = OwnRules()


def _keeps(own: list[Any], x: Any) -> list[Any]:
    own.append(x)
    return own


def _scaled(x: torch.Tensor, scale: float) -> torch.Tensor:
    return x * scale


def _writes(x: torch.Tensor) -> torch.Tensor:
    table = TABLE
    table["scale"] = 3.0
    return x


def _deletes(x: torch.Tensor) -> torch.Tensor:
    del TABLE["scale"]
    return x


def _adds(x: torch.Tensor) -> torch.Tensor:
    table = TABLE
    table |= {"other": 1.0}
    return x


def _sets(x: torch.Tensor) -> torch.Tensor:
    SETTINGS.scale = 3.0
    return x


NUMBERS = [2.0, 3.0]


def _writes_to_list(x: torch.Tensor) -> torch.Tensor:
    NUMBERS[0] = 3.0
    return x


def _adds_to_list(x: torch.Tensor) -> torch.Tensor:
    numbers = NUMBERS
    numbers += [1.0]
    return x


def _deletes_of_list(x: torch.Tensor) -> torch.Tensor:
    del NUMBERS[0]
    return x


def _reads_list(self: Any, x: torch.Tensor) -> torch.Tensor:
    first, second = self.sizes
    for i, n in enumerate([*self.sizes, *NUMBERS]):
        x = x * n + i
    for layer, n in zip(self.steps, self.sizes[::-1]):
        x = layer(x) + n
    whole = self.sizes + [1.0] if 2.0 in self.sizes else []
    return x * sum(n for n in whole) * len(NUMBERS) + first - second


@pytest.mark.parametrize(
    "body", [_writes, _deletes, _adds, _sets, _writes_to_list, _adds_to_list, _deletes_of_list]
)
def test_writes_to_dictionaries_and_objects_are_not_plain(body: Any) -> None:
    assert Reads.of_function(body).opaque


# Settings that are read by names and keys, and how they are changed.
READ: dict[str, tuple[Callable[..., Any], Callable[[Any], object]]] = {
    "a key": (lambda self, x: x * TABLE["scale"], lambda self: TABLE.update(scale=3.0)),
    "a key, if it is there": (lambda self, x: x * TABLE.get("scale", 1), lambda self: TABLE.update(scale=3.0)),
    "a key by name": (lambda self, x: x * TABLE[self.name], lambda self: TABLE.update(scale=3.0)),
    "another key": (lambda self, x: FUNCTIONS[self.chosen](x), lambda self: setattr(self, "chosen", "tanh")),
    "a new key": (
        lambda self, x: x * self.nested[self.chosen]["b"],
        lambda self: (setattr(self, "chosen", "new"), self.nested.update(new={"b": 5.0})),
    ),
    "another function": (
        lambda self, x: FUNCTIONS["twice"](x), lambda self: FUNCTIONS.update(twice=torch.tanh)
    ),
    "in a dictionary": (lambda self, x: x * self.nested["a"]["b"], lambda self: self.nested["a"].update(b=3.0)),
    "an attribute": (lambda self, x: x * SETTINGS.scale, lambda self: setattr(SETTINGS, "scale", 3.0)),
    "an attribute, if it is there": (
        lambda self, x: x * getattr(SETTINGS, "scale", 1), lambda self: setattr(SETTINGS, "scale", 3.0)
    ),
    "an object's": (lambda self, x: x * self.config.scale, lambda self: setattr(self.config, "scale", 3.0)),
    "another object's": (
        lambda self, x: x * self.config.scale, lambda self: setattr(self, "config", Config(scale=3.0))
    ),
    "by a method": (lambda self, x: x * self.config.factor(), lambda self: setattr(self.config, "scale", 3.0)),
    "a list": (_reads_list, lambda self: self.sizes.__setitem__(0, 5.0)),
    "a list that grows": (lambda self, x: x * sum(self.sizes), lambda self: self.sizes.append(3.0)),
    "a list that shrinks": (lambda self, x: x * len(self.sizes), lambda self: self.sizes.__delitem__(slice(1, 2))),
    "a list's order": (lambda self, x: self.steps[0](x) + self.steps[1](x), lambda self: self.steps.reverse()),
    "another list": (lambda self, x: x * self.sizes[-1], lambda self: setattr(self, "sizes", [4.0, 5.0])),
    "none": (
        lambda self, x: x if self.config is None else x * 2, lambda self: setattr(self, "config", None)
    ),
}  # fmt: skip


@pytest.mark.parametrize("while_instances_run", [False, True])
@pytest.mark.parametrize("name", READ)
def test_settings_are_read_by_names_and_keys(name: str, while_instances_run: bool) -> None:
    body, change = READ[name]
    sub = Sub(
        body, name="scale", chosen="twice", nested={"a": {"b": 2.0}, "twice": {"b": 3.0}}, config=Config()
    )
    sub.sizes, sub.steps = [2.0, 3.0], [torch.tanh, torch.relu]
    before = dict(TABLE), dict(FUNCTIONS), dict(vars(SETTINGS))
    assert not Reads.of_module(sub).opaque
    model = Model(sub)
    try:
        for _ in range(2):
            check(model)
        if while_instances_run:

            class Changes(Model):
                def one(self, x: torch.Tensor) -> torch.Tensor:
                    y = self.sub(x)
                    change(self.sub)
                    return y + self.sub(x)

            xs = [torch.randn(2) for _ in range(4)]
            changing, batched = Changes(sub), fxbatch.autobatch(adaptive=False)(Changes.one)
            if name == "another function":
                with pytest.raises(TraceError, match=r"FUNCTIONS\['twice'\] was changed while instances ran"):
                    batched(changing, xs)
                return
            found = batched(changing, xs)
            for table, content in zip((TABLE, FUNCTIONS, vars(SETTINGS)), before, strict=True):
                table.update(content)
            sub.chosen, sub.nested, sub.config = "twice", {"a": {"b": 2.0}, "twice": {"b": 3.0}}, Config()
            sub.sizes, sub.steps = [2.0, 3.0], [torch.tanh, torch.relu]
            torch.testing.assert_close(found, torch.stack([changing.one(x) for x in xs]))
        else:
            change(sub)
        check(model)
    finally:
        for table, content in zip((TABLE, FUNCTIONS, vars(SETTINGS)), before, strict=True):
            table.clear()
            table.update(content)


@pytest.mark.parametrize("name", NOT_PLAIN)
def test_what_is_not_plain(name: str) -> None:
    body, why = NOT_PLAIN[name]
    assert why in reason(body, weight=nn.Parameter(torch.ones(2)), sizes=[1], scale=2.0, nothing=[])


def test_an_entry_that_comes_later_is_compared() -> None:
    table = {0: 1.0}

    class Entry(nn.Module):
        def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
            return x * table[n]

    class Later(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.entry = Entry()

        @fxbatch.autobatch(adaptive=False)
        def forward(self, x: torch.Tensor, n: int) -> torch.Tensor:
            y = self.entry(value(x), 0)
            table[n] = table.get(n, 1.0) + 1.0
            return y + self.entry(value(x), n)

    model = Later()
    for n in (1, 1, 2, 2):
        xs, ns, before = [torch.randn(2) for _ in range(4)], [n, n, n + 5, n], dict(table)
        found = model(xs, ns)
        table.clear()
        table.update(before)
        with fxbatch.disabled():
            assert torch.equal(found, model(xs, ns))


def test_lists_that_grow_are_not_looked_at_for_what_is_not_plain() -> None:
    """As a stack of states: the body was looked at anew at each push, and the calls that were met forgotten."""
    sub = Sub(lambda self, x: x * self.sizes[0] + self.states[0], sizes=[1], states=[torch.ones(2)])
    reads = Reads.of_module(sub)
    assert "self.states[0], a tensor" in reads.opaque
    sub.sizes.append(2)
    sub.states.append(torch.ones(2))
    assert first_changed(reads.items) is None


class WithLength(nn.Module):
    def __len__(self) -> int:
        print("asked")
        return 1


def test_a_part_with_operators_of_its_own() -> None:
    sub = Sub(lambda self, x: x * len(self.part))
    sub.part = WithLength()
    assert "which has a __len__ of its own" in Reads.of_module(sub).opaque


def test_the_line_is_told() -> None:
    assert re.search(r"calls print\(\) \(test_plain_body\.py:\d+\)", reason(NOT_PLAIN["called back"][0]))


def test_another_code_in_the_same_function_is_seen() -> None:
    """As when a notebook's autoreload puts new code into functions."""
    model = Model(Sub(lambda self, x: _replaced(x)))
    before = _replaced.__code__
    check(model)
    try:
        _replaced.__code__ = twice.__code__
        check(model)
    finally:
        _replaced.__code__ = before


def _replaced(x: torch.Tensor) -> torch.Tensor:
    return x * 3


def test_a_tagger_as_the_tutorial_writes_it() -> None:
    torch.manual_seed(0)
    model = tagger.Tagger()
    check_equal(model, *tagger.sentences(6))
    assert not any("tag_to_ix" in why for why in through(model))


class Part(nn.Module):
    """A part that torch's functions run on tensors without memory beside its real weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4))

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.mm(h, self.weight))


HELD: dict[str, Callable[[list[Part]], Any]] = {
    "list": list,
    "tuple": tuple,
    "dict": lambda parts: dict(enumerate(parts)),
    "methods": lambda parts: [p.forward for p in parts],
    "partial": lambda parts: [functools.partial(p) for p in parts],
    "closure": lambda parts: [lambda h, p=p: p(h) for p in parts],
    "nested": lambda parts: [[p] for p in parts],
    "many": lambda parts: parts * 50,
}


@pytest.mark.parametrize("held", HELD)
@pytest.mark.parametrize("rows", [(3, 5, 4, 3), (3, 3, 3, 3)])
def test_parts_that_are_held_twice_get_their_gradients(held: str, rows: tuple[int, ...]) -> None:
    """As `self.attentions = [...]` beside `add_module`, in old code; also parts that are reached in other ways."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            parts = [Part() for _ in range(2)]
            for i, part in enumerate(parts):
                self.add_module(f"part_{i}", part)
            self.parts = HELD[held](parts)
            self.out = nn.Linear(8, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = self.parts[0], self.parts[1]
            if type(first) is list:
                first, second = first[0], second[0]
            return self.out(torch.cat([first(x), second(x)], dim=1))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x).square().mean()

    model = Outer()
    batched = fxbatch.autobatch(Outer.forward, adaptive=False, out="list")
    for _ in range(3):
        xs = [torch.randn(k, 3) for k in rows]
        found = torch.autograd.grad(sum(batched(model, xs)), [*model.parameters()], allow_unused=True)
        expected = torch.autograd.grad(sum(map(model, xs)), [*model.parameters()])
        for a, b in zip(found, expected, strict=True):
            assert a is not None
            torch.testing.assert_close(a, b)
