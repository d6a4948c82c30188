"""What the C extension puts in place while a minibatch is recorded: look-ups of modules, patches, functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxbatch
from fxbatch.errors import TraceError
from fxbatch.trace import calls, modules, state
from fxbatch.trace.minibatch import record_minibatch
from fxbatch.trace.table import SignatureTable
from tests.trace.made import value

PATCHED = ("__call__", "__setattr__", "train", "_apply", "register_buffer")


def record(fn: Any, instances: list[Any], table: SignatureTable | None = None) -> Any:
    """Record a function of vectors, as values, or of whatever else instances are."""

    def of_value(x: Any) -> Any:
        return fn(value(x) if type(x) is torch.Tensor and x.dim() == 1 else x)

    given = fn if isinstance(getattr(fn, "__self__", None), nn.Module) else of_value
    return record_minibatch(given, [((x,), {}) for x in instances], table or SignatureTable(), None)  # type: ignore[arg-type]


class Plain(nn.Module):
    """One of each kind of attribute."""

    scale = 3

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, bias=False)
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.zeros(3))
        self.register_buffer("nothing", None)
        self.plain = [1]
        self.seen: list[Any] = []

    @property
    def broken(self) -> int:
        raise AttributeError("inside the property")

    @property
    def computed(self) -> int:
        return 7

    def forward(self, x: Any) -> Any:
        self.seen.append(look(self))
        return self.linear(x) + self.weight


NAMES = ("linear", "weight", "table", "nothing", "plain", "scale", "computed", "broken", "absent", "forward")


def look(module: nn.Module) -> list[Any]:
    """What each name gives, or the type and text of the error."""
    found: list[Any] = []
    for name in NAMES:
        try:
            x = getattr(module, name)
            found.append(id(x) if isinstance(x, (torch.Tensor, nn.Module, list)) else repr(x))
        except AttributeError as error:
            found.append((type(error), str(error)))
    return found


class Guessing(Plain):
    """A class with a look-up of its own."""

    def __getattr__(self, name: str) -> Any:
        return "guessed" if name == "absent" else super().__getattr__(name)


class Watching(Plain):
    """A class that sees every look-up."""

    def __getattribute__(self, name: str) -> Any:
        return -1 if name == "scale" else super().__getattribute__(name)


@pytest.mark.parametrize("kind", [Plain, Guessing, Watching])
def test_attributes_of_modules_are_what_they_always_are(kind: type[Plain], recorded_by: str) -> None:
    model = kind()
    before = look(model)
    record(model.forward, [torch.ones(3), torch.ones(3)])
    assert model.seen == [before, before]
    assert look(model) == before


def test_a_look_up_that_is_put_on_the_class_while_recording_counts(recorded_by: str) -> None:
    class Changing(Plain):
        def forward(self, x: Any) -> Any:
            with pytest.raises(AttributeError, match="'Changing' object has no attribute 'absent'"):
                self.absent  # noqa: B018 - the look-up is what is tested
            type(self).__getattr__ = lambda self, name: (
                "late" if name == "absent" else nn.Module.__getattr__(self, name)
            )  # type: ignore[method-assign]
            assert self.absent == "late"
            del type(self).__getattr__
            return self.linear(x)

    model = Changing()
    record(model.forward, [torch.ones(3)])
    with pytest.raises(AttributeError, match="no attribute 'absent'"):
        model.absent  # noqa: B018 - as above


def test_removed_and_replaced_parts_are_seen(recorded_by: str) -> None:
    class Moving(Plain):
        def forward(self, x: Any) -> Any:
            kept = self._parameters.pop("weight")
            with pytest.raises(AttributeError):
                self.weight  # noqa: B018 - the look-up is what is tested
            object.__setattr__(self, "weight", "shadow")
            assert self.weight == "shadow"
            object.__delattr__(self, "weight")
            self._parameters["weight"] = kept
            assert self.weight is kept
            return self.linear(x)

    record(Moving().forward, [torch.ones(3)])


def test_what_was_found_is_looked_for_again_where_something_changed(recorded_by: str) -> None:
    other = nn.Linear(3, 3, bias=False)

    class Moving(Plain):
        def forward(self, x: Any) -> Any:
            linear = [self.linear, self.linear][1]
            self._modules["linear"] = other
            assert [self.linear, self.linear] == [other, other]
            self._parameters["linear"] = self.weight
            assert self.linear is self.weight
            del self._parameters["linear"]
            assert [self.linear, self.linear] == [other, other]
            self.__dict__["linear"] = 5
            assert [self.linear, self.linear] == [5, 5]
            del self.__dict__["linear"]
            self.__dict__["_modules"] = {"linear": linear}
            assert [self.linear, self.linear] == [linear, linear]
            del self._modules["linear"]
            with pytest.raises(AttributeError):
                self.linear  # noqa: B018 - the look-up is what is tested
            self._modules["linear"] = linear
            return self.linear(x)

    record(Moving().forward, [torch.ones(3)])


def test_torch_is_put_back(recorded_by: str) -> None:
    """Classes and modules are as before, whether the minibatch ended well or not."""
    watched = [(nn.Module, n) for n in PATCHED] + [
        (m, "handle_torch_function") for m in (F, torch.functional, torch._tensor)
    ]
    before = [owner.__dict__[name] for owner, name in watched]

    def fails(x: Any) -> Any:
        assert nn.Module.__dict__["__call__"] is not before[0]
        raise ValueError("mine")

    record(Plain().forward, [torch.ones(3)])
    assert [owner.__dict__[name] for owner, name in watched] == before
    with pytest.raises(ValueError, match="mine"):
        record(fails, [torch.ones(3)])
    assert [owner.__dict__[name] for owner, name in watched] == before
    assert torch.equal(nn.Linear(2, 2, bias=False)(torch.zeros(2)), torch.zeros(2))


def test_calls_of_functions_are_told_apart(recorded_by: str) -> None:
    """Static arguments that are equal in Python and not to torch, in any order, met again and again."""
    label = torch.tensor(1)

    @fxbatch.autobatch(out="list")
    def f(x: torch.Tensor) -> Any:
        x, out = value(x), []
        for _ in range(3):
            out += [
                torch.clamp(x, 0.0, 1),
                torch.clamp(x, -0.0, 1),
                torch.clamp(x, max=1),
                torch.clamp(x, min=1),
            ]
            out += [torch.sum(x, 0, True), torch.sum(x, 0, False), torch.sum(x, 0), torch.sum(x, (0,), True)]
            out += [F.cross_entropy(x, label), F.cross_entropy(x, label, label_smoothing=0.5)]
            out += [
                F.cross_entropy(x, label, reduction="sum"),
                F.softmax(x, 0),
                F.softmax(x, 0, dtype=torch.float64),
            ]
            out += [torch.stack([x, x]), torch.stack((x, x), 1), torch.cat([x, x, x])]
        return out

    xs = [torch.randn(3) for _ in range(3)]
    with fxbatch.disabled():
        expected = f(xs)
    for got, want in zip(f(xs), expected, strict=True):
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype
            torch.testing.assert_close(a, b)


def test_modes_are_part_of_a_call(recorded_by: str) -> None:
    """A function met with gradients is another one without them, and under another default dtype."""

    def forward(x: Any) -> Any:
        a = torch.tanh(x)
        with torch.no_grad():
            b = torch.tanh(x)
        n = torch.ones(3, dtype=torch.int64)
        halves = [torch.true_divide(x.argmax(), x.argmax() + 1)]
        torch.set_default_dtype(torch.float64)
        try:
            halves.append(torch.true_divide(x.argmax(), x.argmax() + 1))
        finally:
            torch.set_default_dtype(torch.float32)
        assert [h.dtype for h in halves] == [torch.float32, torch.float64]
        return a, b, n

    recording = record(forward, [torch.ones(3, requires_grad=True)] * 3)
    for a, b, _ in recording.results:
        assert a.requires_grad and not b.requires_grad


def test_known_functions_are_settled_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the second call on Python is not asked: this is what the time rests on."""
    if state._fast is None:
        pytest.skip("without the C extension")
    seen: list[Any] = []
    arguments = calls.Arguments
    monkeypatch.setattr(calls, "Arguments", lambda *a, **k: seen.append(a) or arguments(*a, **k))
    label, weight = torch.tensor(1), nn.Parameter(torch.ones(2, 3))

    def forward(x: Any) -> Any:
        y = F.linear(torch.tanh(x), weight).sigmoid()
        return F.cross_entropy(y, label) + torch.cat([y, y], 0).sum(0)

    table = SignatureTable()
    record(forward, [torch.ones(3)] * 2, table)
    first = len(seen)
    record(forward, [torch.ones(3)] * 5, table)
    assert first and len(seen) - first <= first, seen


def test_values_of_other_minibatches_are_refused_by_functions(recorded_by: str) -> None:
    kept: list[Any] = []
    table = SignatureTable()
    record(lambda x: kept.append(torch.tanh(x)) or torch.tanh(x), [torch.ones(3)] * 2, table)

    def mixes(x: Any) -> Any:
        torch.cat([x, x])
        return torch.cat([x, kept[0]])

    with pytest.raises(TraceError, match="another minibatch"):
        record(mixes, [torch.ones(3)], table).pending_program([])


def test_modules_with_structured_arguments_are_settled_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cell called with its state as a tuple, with None, by keyword: looked at closely once a minibatch."""
    if state._fast is None:
        pytest.skip("without the C extension")
    cell, closely = nn.LSTMCell(3, 3), []
    python = modules.call_module
    monkeypatch.setattr(modules, "call_module", lambda *a: closely.append(a[1]) or python(*a))

    def forward(xs: list[torch.Tensor]) -> Any:
        state: Any = None
        for x in xs:
            state = cell(x, state)
        return cell(input=xs[0], hx=state)

    recording = record(forward, [[torch.ones(3)] * 4] * 5)
    assert len(closely) == 3  # without a state, with one, by keyword
    assert len(recording.pending_program(recording.output_ids())) == 1 + 5 * 5


def test_structured_arguments_of_modules_are_told_apart(recorded_by: str) -> None:
    """Numbers, order and keywords of a module's arguments; and hooks that come while it is known."""

    class Scale(nn.Module):
        def forward(self, pair: Any, times: float = 1, minus: Any = None) -> Any:
            a, b = pair
            return (a - 2 * b) * times - (0 if minus is None else minus)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = Scale()
            self.hooked = False

        @fxbatch.autobatch(out="list")
        def forward(self, x: torch.Tensor) -> Any:
            y, out = x + 1, []
            for _ in range(2):
                out += [
                    self.scale((x, y)),
                    self.scale((y, x)),
                    self.scale([x, y], 1.0),
                    self.scale((x, y), 2),
                ]
                out += [
                    self.scale((x, y), minus=y),
                    self.scale((x, y), minus=x),
                    self.scale(pair=(y, y), times=True),
                ]
            if self.hooked:
                handle = self.scale.register_forward_hook(lambda m, args, result: result * 10)
                out.append(self.scale((x, y)))
                handle.remove()
            return out

    model, xs = Model(), [torch.randn(3) for _ in range(3)]
    for model.hooked in (False, True):
        with fxbatch.disabled():
            expected = model(xs)
        for got, want in zip(model(xs), expected, strict=True):
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b)


def test_a_class_that_gets_another_call_while_it_is_recorded(recorded_by: str) -> None:
    """Classes whose known calls C finds at once: what a user sets there is called from then on, and all is put back."""

    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.twice = Twice()

        @fxbatch.autobatch(adaptive=False)
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.twice(x) + self.twice(x + 1)
            Twice.__call__ = lambda self, x: x * 3
            try:
                return y + self.twice(x)
            finally:
                del Twice.__call__

    model, xs = Model(), [torch.tensor([1.0]), torch.tensor([5.0])]
    for _ in range(2):
        assert model(xs).flatten().tolist() == [9.0, 37.0]
    assert model.twice(xs[0]).item() == 2.0


def test_functions_of_torch_without_subclasses(recorded_by: str) -> None:
    """Who turns `__torch_function__` off is told that a value can't go to C++, by torch.nn.functional as well."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            return F.softmax(x, -1)

    with pytest.raises(TraceError, match="got a recorded tensor inside C"):
        record(fn, [torch.ones(3)])
