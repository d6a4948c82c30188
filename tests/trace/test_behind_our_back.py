"""What reads a value past torch's Python functions gets the right answer or a clear error, never an empty tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fxbatch.errors import TraceError
from tests.oracle import check_equal
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


class Strided(nn.Module):
    """A submodule that asks for strides: they are those of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.l = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.l(x.reshape(4)) * x.stride()[0]  # type: ignore[no-any-return]


def branched(self: Any, x: Any) -> Any:
    h = self.l(x)
    if h.sum() > 0:
        h = h * 2
    g = h.view(2, 2).T
    return h * g.stride(0) * (2 + g[1].storage_offset()) * (3 + g[1:].storage_offset())


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
    "stride after a write": (lambda v: v.add_(1).stride(0), "can't be told"),
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
    "stride": lambda self, x: self.l(x) * self.l(x).view(2, 2).t().stride()[0],
    "stride of a dimension": lambda self, x: self.l(x) * torch.Tensor.stride(self.l(x).view(2, 2).t(), 0),
    "is_contiguous": lambda self, x: self.l(x) * (1 + self.l(x).view(2, 2).t().is_contiguous()),
    "of what keeps strides": lambda self, x: self.l(x) * (1 + (self.l(x).view(2, 2).t() + 1).is_contiguous()),
    "contiguous": lambda self, x: self.l(x) * (1 + self.l(x).view(2, 2).t().contiguous().is_contiguous()),
    "storage_offset": lambda self, x: self.l(x) * self.l(x)[2:].storage_offset(),
    "after a branch": branched,
    "in a function for scalars or tensors": lambda self, x: torch.where(self.l(x) > 0, self.l(x), 0.0),
    "view of a parameter": lambda self, x: self.l(x) @ self.l.weight.as_strided((2, 4), (1, 2), 0).T,
}


@pytest.mark.parametrize("name", ANSWERED)
def test_answered_as_eager_does(name: str) -> None:
    check(ANSWERED[name], l=linear)


def test_strides_of_the_instances_own_tensors_and_in_submodules() -> None:
    columns = [x[:, 0] for x in instances(3, 4, 2)]
    check_equal(model(lambda self, x: self.l(x) * (x + self.l(x)).stride(0), l=linear), columns)
    check(lambda self, x: self.s(self.l(x).view(2, 2).t()), l=linear, s=Strided)


def test_scripted_functions_inside_submodules_are_recorded() -> None:
    check(lambda self, x: self.l(x), l=Scripted)
