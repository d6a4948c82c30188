"""Code that makes numbers of sizes: what Python's own functions give of a size is a size."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from math import sqrt
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fxbatch.ragged.check import check_against_body
from fxbatch.ragged.packed_function import PackedFunction
from fxbatch.ragged.stand_ins import TYPES, stand_ins
from fxbatch.ragged.symbolic import NoPackedForm

Tensors = list[torch.Tensor]


class LinearND(nn.Module):
    """A linear layer over the last of any dimensions, as speech models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        size = x.size()
        out = self.fc(x.contiguous().view(int(np.prod(size[:-1])), size[-1]))
        size = list(size)  # type: ignore[assignment]
        size[-1] = out.size()[-1]  # type: ignore[index]
        return out.view(size)


BODIES: dict[str, Callable[[torch.Tensor], Tensors]] = {
    "int of a product": lambda x: [x.view(int(np.prod(x.shape[:2])), 8) * 2],
    "int of a half": lambda x: [x[:, : int(x.size(1) / 2) + 1].sum(1)],
    "int of a float": lambda x: [x[:, : max(1, int(0.5 * x.size(1)))].sum(1)],
    "int of a size": lambda x: [x.expand(3, int(x.size(1)), 8)],
    "a square of what is rounded": lambda x: [_square(x, int(0.5 * x.size(1)) + 1)],
    "log": lambda x: [math.log(x.size(1)) * x],
    "log of numpy": lambda x: [np.log2(x.size(1)) * x + math.log(8.0) + math.log(8, 2)],
    "root": lambda x: [x / math.sqrt(x.size(1)) + x / sqrt(x.shape[1])],
    "root of numpy": lambda x: [x / np.sqrt(x.size(1))],
    "float": lambda x: [x.sum(1) / max(float(x.size(1)), 1.0)],
    "float of len": lambda x: [x[0] / (float(len(x[0])) ** 0.5)],
    "ceil and floor": lambda x: [x[:, : math.ceil(x.size(1) / 2)].sum(1) + math.floor(x.size(1) / 3)],
    "others of numpy": lambda x: [x.sum(1) * float(np.arange(3).sum()) + int("3") + int(2.5) + float("1e-3")],
}


def _square(x: torch.Tensor, n: int) -> torch.Tensor:
    rows = x[0, :n]
    pairs = torch.cat([rows.unsqueeze(0).expand(n, n, 8), rows.unsqueeze(1).expand(n, n, 8)], -1)
    return pairs.view(n * n, 16).view(n, n, 16).sum(-1) + rows[:, 0]


@pytest.mark.parametrize("name", BODIES)
def test_numbers_that_are_made_of_sizes(name: str) -> None:
    body = BODIES[name]
    function = PackedFunction.of(body, [torch.rand(1, 7, 8)], [(1,)], [], flags_known=False, code=[body])
    sizes = [3, 7, 2, 12, 37]
    assert function.graph.fitting([np.array(sizes)]).all() and not function.lowered.alone
    check_against_body(function, [[torch.rand(1, n, 8) for n in sizes]], [])


def test_a_layer_over_the_last_dimension() -> None:
    layer = LinearND()
    shared = list(layer.parameters())

    def body(x: torch.Tensor, *parameters: torch.Tensor) -> Tensors:
        return [
            torch.func.functional_call(
                layer, dict(zip(("fc.weight", "fc.bias"), parameters, strict=True)), (x,)
            )
        ]

    function = PackedFunction.of(body, [torch.rand(1, 7, 8)], [(1,)], shared, flags_known=False, code=[layer])
    check_against_body(function, [[torch.rand(1, n, 8) for n in (3, 1, 12)]], shared)


def test_a_loop_over_a_size_has_no_form() -> None:
    def body(x: torch.Tensor) -> Tensors:
        return [sum((x[:, i] for i in range(int(x.size(1)))), x[:, 0])]  # type: ignore[list-item]

    with pytest.raises(NoPackedForm, match="as a plain number"):
        PackedFunction.of(body, [torch.rand(1, 7, 8)], [(1,)], [], flags_known=False, code=[body])


def test_what_was_there_is_there_again() -> None:
    """Also what other threads see meanwhile behaves as what it stands for."""
    space: dict[str, Any] = globals()
    before = dict(space)
    seen: list[object] = []

    def look() -> None:
        seen.extend(
            [
                isinstance(3, int),
                isinstance(2.5, float),
                int("7"),
                {int: 1}[(3).__class__],
                issubclass(bool, int),
            ]
        )
        seen.extend(
            [math.sqrt(4.0), np.sqrt(4.0), np.arange(2).tolist(), math.pi, hash(int) == hash((3).__class__)]
        )

    with stand_ins([look], TYPES):
        assert space["int"] is not (3).__class__ and "of" in vars(space["math"])
        other = threading.Thread(target=look)
        other.start()
        other.join()
    assert seen == [True, True, 7, 1, True, 2.0, 2.0, [0, 1], math.pi, True]
    assert space == before


@pytest.mark.parametrize("catches", [False, True])
def test_a_loop_over_a_size_is_not_gone_through(catches: bool) -> None:
    """Where the code asks for a plain number the trace ends: the steps of a loop would take most of its time."""
    steps: list[int] = []

    def body(x: torch.Tensor) -> Tensors:
        h = x[:, 0]
        try:
            count = range(x.size(1))
        except Exception:
            if not catches:
                raise
            return [h]
        for i in count:
            steps.append(i)
            h = torch.tanh(h + x[:, i])
        return [h]

    with pytest.raises(NoPackedForm, match=r"as a plain number \(7 here\)"):
        PackedFunction.of(body, [torch.rand(1, 7, 8)], [(1,)], [], flags_known=False, code=[body])
    assert not steps
