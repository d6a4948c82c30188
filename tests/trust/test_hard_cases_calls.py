"""Calls that PyTorch makes in ways of its own: packed sequences, lazy modules, compiled helpers, torch.cond."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import (
    PackedSequence,
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
    pad_sequence,
    unpack_sequence,
)

import fxbatch
from fxbatch.errors import TraceError
from tests.oracle import check_equal


def model(forward: Callable[..., Any], **parts: nn.Module) -> nn.Module:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, part in parts.items():
                setattr(self, name, part)

    Model.forward = fxbatch.autobatch(forward)  # type: ignore[method-assign]
    torch.manual_seed(0)
    return Model()


def sequences(*lengths: int) -> list[torch.Tensor]:
    return [torch.randn(n, 4, generator=torch.Generator().manual_seed(n)) for n in lengths]


RECURRENT: dict[str, Callable[[], nn.RNNBase]] = {
    "LSTM, two layers, both directions": lambda: nn.LSTM(4, 3, num_layers=2, bidirectional=True, bias=False),
    "LSTM with a projection": lambda: nn.LSTM(4, 5, proj_size=2),
    "GRU, both directions": lambda: nn.GRU(4, 3, bidirectional=True),
    "RNN with relu": lambda: nn.RNN(4, 3, nonlinearity="relu"),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_recurrent_layers_on_packed_sequences_of_values(name: str) -> None:
    def forward(self: Any, xs: list[torch.Tensor]) -> torch.Tensor:
        packed = pack_sequence([self.l(x) for x in xs], enforce_sorted=False)
        output, state = self.rnn(packed)
        assert isinstance(output, PackedSequence)
        padded, lengths = pad_packed_sequence(output, padding_value=0.5)
        assert lengths.tolist() == [len(x) for x in xs]
        return padded.sum() + sum(s.square().sum() for s in (state if isinstance(state, tuple) else (state,)))

    check_equal(
        model(forward, l=nn.Linear(4, 4), rnn=RECURRENT[name]()),
        [sequences(2), sequences(1, 3, 1), sequences(1, 2)],
    )


def test_packing_and_unpacking_values() -> None:
    def forward(self: Any, xs: list[torch.Tensor]) -> torch.Tensor:
        h = pad_sequence([self.l(x) for x in xs], batch_first=True)
        packed = pack_padded_sequence(h, [len(x) for x in xs], batch_first=True)
        first, _ = self.rnn(packed, h.new_ones(1, len(xs), 3))
        padded, _ = pad_packed_sequence(first, batch_first=True, total_length=6)
        return padded.tanh().sum(0) + unpack_sequence(packed)[0].sum()

    check_equal(model(forward, l=nn.Linear(4, 4), rnn=nn.GRU(4, 3)), [sequences(3, 2)] * 2)


def test_what_can_not_be_packed_is_said() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = self.l(x)
        return pack_padded_sequence(torch.stack([h, h], 1), [1, 3]).data

    with pytest.raises(RuntimeError, match="sorted"):
        model(forward, l=nn.Linear(4, 4))(sequences(3))


LAZY: dict[str, tuple[Callable[[], nn.Module], Callable[..., Any]]] = {
    "alone": (lambda: nn.LazyLinear(3), lambda self, x: self.part(x[0])),
    "of values": (lambda: nn.LazyLinear(3), lambda self, x: self.part(self.l(x[0]))),
    "in a sequence": (
        lambda: nn.Sequential(nn.LazyLinear(5), nn.Tanh(), nn.LazyLinear(2)), lambda self, x: self.part(x[0]) * 2
    ),
    "a convolution": (lambda: nn.LazyConv1d(3, 1), lambda self, x: self.part(self.l(x).t()).sum(1)),
}  # fmt: skip


@pytest.mark.parametrize("name", LAZY)
def test_lazy_modules_make_their_parameters_at_the_first_call(name: str) -> None:
    part, forward = LAZY[name]
    m, xs = model(forward, l=nn.Linear(4, 4), part=part()), sequences(3, 3, 3)
    other = copy.deepcopy(m)
    torch.manual_seed(1)
    found = m(xs)
    torch.manual_seed(1)
    with fxbatch.disabled():
        torch.testing.assert_close(found, other(xs))
    check_equal(m, xs)


def twice(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x) * 2 if x.sum() > 0 else x


class Helper(nn.Module):
    """A submodule that calls a compiled function."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.l(x))


Forward = Callable[..., Any]


def calls(helper: Callable[..., Any]) -> Forward:
    return lambda self, x: helper(self.l(x))


# A forward and its parts, made when they are asked for: torch.compile itself imports for seconds.
COMPILED: dict[str, Callable[[], tuple[Forward, dict[str, Any]]]] = {
    "a function": lambda: (calls(torch.compile(twice)), {}),
    "a whole graph": lambda: (calls(torch.compile(torch.tanh, fullgraph=True)), {}),
    "a module": lambda: (lambda self, x: self.c(self.l(x)), {"c": torch.compile(nn.Linear(4, 2))}),
    "in a submodule": lambda: (lambda self, x: self.s(x) + 1, {"s": Helper(torch.compile(torch.sin))}),
    "with a branch in a submodule": lambda: (
        lambda self, x: self.s(x) + 1,
        {"s": Helper(torch.compile(twice))},
    ),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_helpers_are_the_python_they_were_made_from(name: str) -> None:
    """Decorated, nothing is compiled: the stance would make an error of it."""
    forward, parts = COMPILED[name]()
    m, xs = model(forward, l=nn.Linear(4, 4), **parts), list(torch.randn(4, 4))
    with torch.compiler.set_stance("force_eager"):  # the loop itself: what is compiled is PyTorch's matter
        check_equal(m, xs)
    with torch.compiler.set_stance("fail_on_recompile"):
        found = m(xs)
    with fxbatch.disabled(), torch.compiler.set_stance("force_eager"):
        torch.testing.assert_close(found, m(xs))


def by_if(chosen: Any, yes: Any, no: Any, operands: Any) -> torch.Tensor:
    return yes(*operands) if chosen else no(*operands)


class Branches(nn.Module):
    """A submodule that branches on a value: by torch.cond, or by an `if`."""

    def __init__(self, cond: Callable[..., Any]) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)
        self.cond = cond

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.l(x)
        return self.cond(h.sum() > 0, lambda y: y * 2, lambda y: y.tanh(), (h,))


@pytest.mark.parametrize("where", ["forward", "submodule"])
def test_cond_is_an_if(where: str) -> None:
    xs = list(torch.randn(4, 4, generator=torch.Generator().manual_seed(3)))
    results = []
    for cond in (lambda *args: torch.cond(*args), by_if):
        part = Branches(cond)
        m = (
            model(part.forward.__func__, l=part.l)
            if where == "forward"
            else model(lambda self, x: self.s(x) * 3, s=part)
        )  # type: ignore[attr-defined]
        m.cond = cond  # type: ignore[assignment]
        for p in m.parameters():
            nn.init.constant_(p, 0.3)
        if cond is by_if:
            check_equal(m, xs)
        found = m(xs)
        results.append([found, *torch.autograd.grad(found.sum(), list(m.parameters()))])
    torch.testing.assert_close(*results)


def test_other_operators_that_take_functions_name_the_line() -> None:
    from torch._higher_order_ops import while_loop

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return while_loop(lambda y: y.sum() < 9, lambda y: (y + 1,), (self.l(x),))[0]

    with pytest.raises(TraceError, match=r"while_loop got a recorded tensor.*test_hard_cases_calls\.py"):
        model(forward, l=nn.Linear(4, 4))([torch.randn(4)])


class Attention(nn.Module):
    """Leaves its weights where a user may look at them."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weights = torch.softmax(self.l(x), 0)
        return self.weights * x


def test_an_attribute_that_a_disabled_call_left_is_no_buffer() -> None:
    m, xs = model(lambda self, x: self.a(x), a=Attention()), [torch.randn(4) for _ in range(3)]
    m(xs)
    for _ in range(2):
        with fxbatch.disabled():
            expected = m(xs)
        wanted = torch.autograd.grad(expected.sum(), m.a.l.weight)
        for _ in range(2):
            found = m(xs)
            torch.testing.assert_close(found, expected)
            torch.testing.assert_close(torch.autograd.grad(found.sum(), m.a.l.weight), wanted)
