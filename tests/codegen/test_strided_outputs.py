"""Calls that are told to write into a part of a wider tensor write that part, and nothing beside it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import fxbatch
from fxbatch.codegen.kernel_calls import honours_strides, out_call
from fxbatch.trace.operations import operation
from tests.oracle import check_equal

aten = torch.ops.aten


def _node(target: Any) -> Any:
    return SimpleNamespace(target=target, op="call_function", args=(), kwargs={})


def _spills(target: Any, *args: Any) -> bool:
    """Whether the call, written into the middle of a tensor with room on all sides, is wrong anywhere."""
    found = out_call(target)
    assert found is not None
    reference = target(*args)
    spills = False
    for dim in range(1, reference.dim()):
        size = reference.shape[dim]
        shape = list(reference.shape)
        shape[0], shape[dim] = 3 * shape[0], size + 9
        wide = torch.zeros(shape, dtype=reference.dtype)
        part = wide[: len(reference)].narrow(dim, 4, size)
        found[2](*args, **{found[1]: part})
        expected = torch.zeros(shape, dtype=reference.dtype)
        expected[: len(reference)].narrow(dim, 4, size).copy_(reference)
        spills |= not torch.allclose(wide, expected, equal_nan=True)
    return spills


def _pointwise() -> list[tuple[Any, tuple[Any, ...]]]:
    """Every pointwise ATen call with an `out=` that takes tensors and numbers, and arguments for it."""
    found = []
    for name in sorted(set(torch._C._dispatch_get_all_op_names())):
        space, _, rest = name.partition("::")
        word, _, overload = rest.partition(".")
        if space != "aten":
            continue
        target = getattr(getattr(aten, word), overload or "default", None)
        if target is None or target._schema.is_mutable or torch.Tag.pointwise not in target.tags:
            continue
        if out_call(target) is None:
            continue
        found += [(target, _arguments(target))]
    return [(target, args) for target, args in found if args is not None]


def _arguments(target: Any) -> Any:
    makers: dict[str, Any] = {
        "Tensor": _tensor,
        "number": lambda: 0.5,
        "float": lambda: 0.5,
        "int": lambda: 1,
    }
    args: list[Any] = []
    for argument in target._schema.arguments:
        if argument.has_default_value():
            break
        maker = makers.get(str(argument.type))
        if maker is None:
            return None
        args.append(maker())
    return tuple(args)


def _tensor() -> torch.Tensor:
    return torch.rand(4, 40, generator=torch.Generator().manual_seed(1)) * 0.8 + 0.1


def test_pointwise_calls_write_the_part_they_are_given() -> None:
    checked = 0
    for target, args in _pointwise():
        if not honours_strides(_node(target)):
            continue
        try:
            target(*args)
        except (RuntimeError, TypeError, NotImplementedError, IndexError):
            continue  # takes other types: bits, booleans
        assert not _spills(target, *args), target
        checked += 1
    assert checked > 100


def _rand(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(len(shape)))


_INDEX = torch.tensor([2, 0, 1, 2])
OTHERS: list[tuple[Any, ...]] = [
    (aten.mm.default, _rand(5, 6), _rand(6, 3)),
    (aten.mm.default, _rand(64, 40), _rand(50, 40).t()),
    (aten.addmm.default, _rand(3), _rand(5, 6), _rand(6, 3)),
    (aten.addmm.default, _rand(50), _rand(64, 40), _rand(40, 50)),
    (aten.bmm.default, _rand(5, 6, 4), _rand(5, 4, 3)),
    (aten.bmm.default, _rand(5, 6, 1), _rand(5, 1, 3)),
    (aten.bmm.default, _rand(5, 40, 60), _rand(5, 60, 30)),
    (aten.baddbmm.default, _rand(5, 6, 3), _rand(5, 6, 4), _rand(5, 4, 3)),
    (aten.sum.dim_IntList, _rand(5, 3, 4), [1]),
    (aten.mean.dim, _rand(5, 3, 4), [2], True),
    (aten.amax.default, _rand(5, 3, 4), [1]),
    (aten.amin.default, _rand(5, 3, 4), [2]),
    (aten.prod.dim_int, _rand(5, 3, 4), 1),
    (aten.logsumexp.default, _rand(5, 3, 4), [1]),
    (aten.index_select.default, _rand(5, 3, 4), 0, _INDEX),
    (aten.index_select.default, _rand(5, 3, 4), 1, _INDEX),
    (aten.index_select.default, _rand(5, 3), 1, _INDEX),
    (aten.gather.default, _rand(4, 3), 1, _INDEX[:, None].expand(4, 7)),
    (aten.index.Tensor, _rand(5, 3, 4), [_INDEX]),
    (aten.scatter_add.default, _rand(4, 3), 1, _INDEX[:, None], _rand(4, 1)),
    (aten.index_add.default, _rand(5, 3, 4), 1, _INDEX[:2], _rand(5, 2, 4)),
    (aten.cumsum.default, _rand(5, 3, 4), 1),
    (aten.tril.default, _rand(5, 4, 4)),
    (aten.triu.default, _rand(5, 4)),
]


@pytest.mark.parametrize("call", OTHERS, ids=lambda call: str(call[0]))
def test_other_calls_write_the_part_they_are_given(call: tuple[Any, ...]) -> None:
    assert honours_strides(_node(call[0]))
    assert not _spills(*call)


def test_softmax_does_not_write_the_part_it_is_given() -> None:
    """The fault of PyTorch that `honours_strides` is there for: this check can see it."""
    assert _spills(aten._softmax.default, _rand(4, 3), 1, False)
    assert not honours_strides(_node(aten._softmax.default))


CALLS = {
    "softmax": lambda x: torch.softmax(x, 0),
    "log_softmax": lambda x: torch.log_softmax(x, 0),
    "gelu": torch.nn.functional.gelu,
    "logsumexp": lambda x: torch.logsumexp(x, 0, keepdim=True),
    "normalize": lambda x: torch.nn.functional.normalize(x, dim=0),
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x, (5,)),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_concatenated_in_an_operation(name: str) -> None:
    """Forward: the result goes into a part. Backward of a split: the gradient does."""
    call = CALLS[name]

    @operation
    def joined(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.cat([y.sin(), call(x), y])

    @operation
    def parted(x: torch.Tensor) -> torch.Tensor:
        a, b, c = x.split([2, 5, 4])
        return call(b) * a.sum() + c.sin().sum()

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 11)

        @fxbatch.autobatch
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return joined(parted(y).sin(), y)

    torch.manual_seed(0)
    check_equal(Model(), torch.randn(7, 4))
