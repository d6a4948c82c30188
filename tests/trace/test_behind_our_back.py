"""What reads a value past torch's Python functions gets the right answer or a clear error, never an empty tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fxbatch.errors import TraceError
from tests.trace.made import check, instances, linear, model


@torch.jit.script
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.jit.script
def first_size(x: torch.Tensor) -> int:
    return x.size(0)


triple = torch.jit.trace(lambda x: x * 3, torch.ones(4))


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return double(self.l(x))  # type: ignore[no-any-return]


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "scripted function": (double, "double is TorchScript"),
    "scripted function that asks for a size alone": (first_size, "first_size is TorchScript"),
    "traced function": (triple, "is TorchScript"),
    "torch.Tensor": (torch.Tensor, r"aten.alias.default got a recorded tensor inside C\+\+"),
    "torch.FloatTensor": (torch.FloatTensor, r"aten.alias.default got a recorded tensor inside C\+\+"),
    "set_": (lambda v: torch.empty(0).set_(v), r"aten.set_.source_Tensor got a recorded tensor inside C\+\+"),
    "data_ptr": (lambda v: v.data_ptr() == v.clone().data_ptr(), "asks for the memory"),
    "as_strided": (lambda v: v[2:].as_strided((2,), (1,), 0), "asks for the memory"),
    "version": (lambda v: v.add_(1)._version, "asks for the memory"),
    "base": (lambda v: v.view(2, 2)._base is None, "asks for the memory"),
    "output_nr": (lambda v: v.chunk(2)[1].output_nr, "asks for the memory"),
    "is_conj": (lambda v: torch.complex(v, v).conj().is_conj(), "asks for the memory"),
    "stride": (lambda v: v.view(2, 2).t().stride()[0], "can't be told"),
    "stride of a dimension": (lambda v: torch.Tensor.stride(v.view(2, 2).t(), 0), "can't be told"),
    "is_contiguous": (lambda v: v.view(2, 2).t().is_contiguous(), "can't be told"),
    "storage_offset": (lambda v: v[2:].storage_offset(), "can't be told"),
    "dim_order": (lambda v: v.dim_order(), "can't be told"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_the_users_line(name: str) -> None:
    read, message = REFUSED[name]

    def forward(self: Any, x: Any) -> Any:
        h = self.l(x).detach()
        return self.l(x) + read(h)

    made = model(forward, l=linear)
    for _ in range(2):  # in the second minibatch as well
        with pytest.raises(TraceError, match=message) as caught:
            made(instances())
        assert "test_behind_our_back.py" in str(caught.value)


ANSWERED: dict[str, Callable[[Any, Any], Any]] = {
    "in a function for scalars or tensors": lambda self, x: torch.where(self.l(x) > 0, self.l(x), 0.0),
    "view of a parameter": lambda self, x: self.l(x) @ self.l.weight.as_strided((2, 4), (1, 2), 0).T,
}


@pytest.mark.parametrize("name", ANSWERED)
def test_answered_as_eager_does(name: str) -> None:
    check(ANSWERED[name], l=linear)


def test_scripted_functions_inside_submodules_are_recorded() -> None:
    check(lambda self, x: self.l(x), l=Scripted)


class Counting(nn.Module):
    """Writes to its buffer in a way that torch does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.l = linear()
        self.register_buffer("n", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n.data.add_(1.0)  # type: ignore[operator]
        return self.l(x) + self.n  # type: ignore[no-any-return]


class Shifting(nn.Module):
    """Reads and writes through `.data` of what it was given or computed."""

    def __init__(self) -> None:
        super().__init__()
        self.l = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.l(x)
        y.data[0] = 1.0
        return torch.tanh(y - y.data.max()) * self.l.weight.data.new(4).fill_(2.0)


def test_a_module_that_writes_to_its_buffer_through_data() -> None:
    def forward(self: Any, x: Any) -> Any:
        return self.l(self.counting(x))

    made = model(forward, {"adaptive": False}, l=linear(), counting=Counting())
    with pytest.raises(TraceError, match="writes to a parameter or buffer"):
        made(instances())


def test_a_module_that_reads_and_writes_through_data() -> None:
    check(lambda self, x: self.l(self.shifting(x)), l=linear(), shifting=Shifting())
