"""Functions of torch on tensors of their own sizes are packed by a tape of what they call, where each of its calls has
a rule; others, and modules, by make_fx."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxbatch
from fxbatch.ragged import packed_function, symbolic
from fxbatch.ragged.check import check_against_body
from fxbatch.ragged.packed_function import PackedFunction
from fxbatch.ragged.symbolic import is_composite
from tests.oracle import check_equal

FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, y: x + y,
    "scaled difference": lambda x, y: torch.sub(x, y, alpha=3),
    "product with a row": lambda x, y: x * y[:1],
    "greater": lambda x, y: (x > y).float(),
    "minimum": lambda x, y: torch.min(x, y),
    "power": lambda x, y: x.abs() ** 1.5,
    "sum of rows": lambda x, y: x.sum(0),
    "mean": lambda x, y: x.mean(),
    "norm": lambda x, y: x.norm(2, -1, keepdim=True),
    "logsumexp": lambda x, y: x.logsumexp(-1),
    "argmax": lambda x, y: x.argmax(0),
    "largest": lambda x, y: x.max(0)[0],
    "slices": lambda x, y: x[1:, 1:3],
    "new dimensions": lambda x, y: x[:, None] - y[None],
    "transposed": lambda x, y: x.transpose(0, 1),
    "of another type": lambda x, y: x.double(),
    "stacked": lambda x, y: torch.cat([x, y], 1),
    "cumulated": lambda x, y: x.cumsum(0),
    "a view": lambda x, y: x.view(x.shape[0], 2, 2),
    "expanded": lambda x, y: x[:, None].expand(x.shape[0], 3, 4),
    "zeros": lambda x, y: x.new_zeros(x.shape[0], 2) + x[:, :2],
    "softmax": lambda x, y: torch.softmax(x, 0),
}


def instances(sizes: tuple[int, ...]) -> list[list[Tensor]]:
    torch.manual_seed(0)
    return [[torch.randn(n, 4, requires_grad=True) for _ in range(2)] for n in sizes]


def no_graphs(*_: Any) -> Any:
    raise AssertionError("make_fx was asked")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(symbolic, "trace_with_sizes", no_graphs)
    function = FUNCTIONS[name]

    def body(x: Tensor, y: Tensor) -> list[Tensor]:
        return [function(x, y)]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        packed = PackedFunction.of(
            body, [t.detach() for t in instances((5,))[0]], ((0,), (0,)), [], by_tape=True
        )
    assert packed.graph.how["by_tape"] and not packed.lowered.alone
    columns = list(zip(*instances((5, 2, 7, 1, 3)), strict=True))
    fits = packed.graph.fitting(packed.columns_of(columns))
    assert fits[[0, 1, 2, 4]].all()
    check_against_body(packed, [[t for t, good in zip(c, fits, strict=True) if good] for c in columns], [])


def test_what_has_no_rule_is_asked_of_make_fx(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    class Noting(symbolic.SizedGraph):
        def __init__(self, *args: Any, by_tape: bool = False, **kwargs: Any) -> None:
            asked.append(by_tape)
            super().__init__(*args, by_tape=by_tape, **kwargs)

    monkeypatch.setattr(packed_function, "SizedGraph", Noting)

    def body(x: Tensor) -> list[Tensor]:
        return [x.median(0)[0]]

    packed = PackedFunction.of(body, [torch.randn(5, 4)], ((0,),), [], by_tape=True)
    assert asked == [True, False] and not packed.graph.how["by_tape"]


def test_composites_are_kept_for_their_rules() -> None:
    assert is_composite(torch.nn.functional.linear) and is_composite(torch.matmul)
    assert not any(map(is_composite, (torch.tanh, torch.add, torch.Tensor.__getitem__, torch.Tensor.sum)))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 6)

    @fxbatch.autobatch(adaptive=False)
    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(x))
        return (h[:, 1:4] * 2.0).sum(0)


def test_functions_of_a_recorded_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call of make_fx, for the module; there were four more."""
    asked: list[object] = []
    trace = symbolic.trace_with_sizes
    monkeypatch.setattr(symbolic, "trace_with_sizes", lambda *args: (asked.append(args[0]), trace(*args))[1])
    torch.manual_seed(0)
    model = Encoder()
    xs = [torch.randn(n, 4) for n in (3, 5, 7, 4, 6, 9, 8)]
    check_equal(model, xs)
    assert len(asked) == 1
