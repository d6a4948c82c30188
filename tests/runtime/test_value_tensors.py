"""What values are outside of a run's memory: each a place in a column, and no Python for each where they are many."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fxbatch
from fxbatch.ragged.lengths import Lengths
from fxbatch.ragged.packed_column import PACKED, PackedColumn
from fxbatch.runtime.value_tensors import HELD_APART, ValueTensors, is_of_packed
from fxbatch.trace.constants import RowColumn
from tests.lines import lines_of
from tests.oracle import check_equal


def test_values_are_places_in_columns() -> None:
    tensors, rows = ValueTensors(), torch.arange(12.0).view(6, 2)
    sizes = Lengths(np.array([1, 2, 3]), rows.device)
    packed = PackedColumn(rows, PACKED, (0,), [sizes], 3)
    tensors.make_room(8)
    tensors.put(np.array([0, 2, 4]), packed, mark=HELD_APART)
    tensors.put(np.array([1]), [torch.ones(2, 2)])
    tensors.put(np.array([3, 5]), packed, np.array([2, 0]))
    assert tensors.of(2).tolist() == rows[1:3].tolist() and tensors.of(1).tolist() == [[1, 1], [1, 1]]
    found = tensors.column_of(np.array([4, 3, 2]))
    assert found is not None and found[0] is packed and found[1].tolist() == [2, 2, 1], "put in two parts"
    assert tensors.column_of(np.array([0, 1])) is None and tensors.column_of(np.array([7])) is None
    whole = tensors.column_of(np.array([0, 2, 4]))
    assert whole is not None and whole[0].taken(whole[1]) is packed
    turned = tensors.column_of(np.array([4, 0]))
    assert turned is not None
    assert [x.tolist() for x in turned[0].taken(turned[1])] == [rows[3:].tolist(), rows[:1].tolist()]
    assert (tensors.marks[:6] == [3, 1, 3, 1, 3, 1]).all() and not tensors.marks[6:8].any()


def test_constants_that_are_places_stay_so_until_they_are_read() -> None:
    tensors, rows = ValueTensors(), torch.arange(6.0).view(3, 2)
    column, alone = PackedColumn.of_rows(rows), torch.full((2,), 9.0)
    tensors.make_room(6)
    tensors.put(np.array([0, 1, 2]), column)
    tensors.put(np.array([3, 4]), [alone, alone])
    payload = tensors.payload(np.array([2, 3, 0, 4]))
    assert is_of_packed(payload) and type(payload) is RowColumn
    sources: Any = payload.sources
    assert [x is column for x in sources].count(True) == 1 and len(sources) == 3
    assert payload.row.tolist() == [2, -1, 0, -1]
    plain = tensors.payload(np.array([3, 4]))
    assert not is_of_packed(plain) and all(x is alone for x in plain)


class Chain(nn.Module):
    """Calls on sentences of their own lengths, one after another: each is one launch for all instances."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        self.out = nn.Linear(4, 2)

    @fxbatch.autobatch(adaptive=False, out="list")
    def forward(self, words: list[Tensor]) -> Tensor:
        x = torch.stack(words)
        for layer in (self.first, self.second, self.third) * 4:
            x = torch.tanh(layer(x))
        return self.out(x.sum(0))


def sentences(instances: int) -> list[list[Tensor]]:
    return [list(torch.randn(2 + (5 * i) % 17, 4).unbind(0)) for i in range(instances)]


@pytest.mark.parametrize("gradients", [False, True])
def test_a_packed_call_runs_no_python_for_each_instance(gradients: bool) -> None:
    torch.manual_seed(0)
    model = Chain()
    with torch.set_grad_enabled(gradients):
        for seed in range(4):
            torch.manual_seed(seed)
            model(sentences(40))
        lines = []
        for instances in (16, 64):
            batch = sentences(instances)
            model(batch)
            lines.append(lines_of(lambda batch=batch: model(batch), "runtime"))  # type: ignore[misc]
    assert next(iter(model.__dict__["_fxbatch_engines"].values())).packed_calls.families[0].steps > 0
    each = (lines[1] - lines[0]) / 48
    assert each <= 30, f"{each} lines an instance, of 25 calls"
    check_equal(model, sentences(9), gradients=gradients)
