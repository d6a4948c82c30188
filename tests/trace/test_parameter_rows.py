"""Rows of parameters that Python chooses: looked up by number where there are many, so that other rows share steps."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxbatch
from fxbatch.errors import BatchCoupledError, InPlaceError
from fxbatch.trace import arguments, calls, torch_patches
from fxbatch.trace.arguments import MANY_ROWS, take_parameter_row
from fxbatch.trace.state import _fast
from tests.oracle import check_equal
from tests.trace.made import value

Rows = list[int]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.scores = nn.Parameter(torch.randn(9, 4)), nn.Parameter(torch.randn(3, 3))
        self.matrices = nn.Parameter(torch.randn(9, 4, 4))
        self.cell = nn.GRUCell(4, 4)
        self.register_buffer("places", torch.randn(9, 4))


class InFunctions(Model):
    def forward(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        x = value(x)
        score = x.sum()
        for a, b in itertools.pairwise(rows):
            x = torch.tanh(x + self.table[a]) * self.places[b]
            score = score + self.scores[a % 3, b % 3] + x.max()
        return score


class InModules(Model):
    def forward(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        for row in rows:
            x = self.cell(self.table[row], x)
        return x


class OfMatrices(Model):
    def forward(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        for row in rows:
            x = torch.tanh(self.matrices[row] @ x)
        return x


class WithoutGradients(Model):
    """Rows that were taken under `no_grad`, used with gradients."""

    def forward(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        with torch.no_grad():
            taken = [self.table[row] for row in rows]
        for row in taken:
            x = torch.tanh(x * row + self.table[0])
        return x


class TakenBothWays(Model):
    """The same rows with gradients and without, of a module's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 4)

    def forward(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        for row in rows:
            x = torch.tanh(x + self.embed.weight[row])
        with torch.no_grad():
            taken = [self.embed.weight[row] for row in rows]
        for row in taken:
            x = torch.tanh(x * row)
        return x


class ByTensors(Model):
    """Rows that tensors of the instance choose, as tags do."""

    def forward(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        tags = torch.tensor(rows)
        score = (x @ self.places[:4]).sum()
        for a, b in itertools.pairwise(tags):
            score = score + self.scores[a % 3, b % 3] * self.table[a].sum() + self.scores[a % 3, 1]
        return score * x[tags[0] % 4]


class Elsewhere(Model):
    """Views with the number of dimensions of a row that are none."""

    def forward(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        for row in rows:
            x = torch.tanh(
                x + self.matrices[row, :, 1] + self.table[row : row + 1, 0] + self.matrices[row][2]
            )
        return x


def minibatch(rows: int = 9) -> tuple[list[torch.Tensor], list[Rows]]:
    xs = list(torch.randn(rows, 4, dtype=torch.get_default_dtype()))
    return xs, [[(3 * i + 2 * k) % 9 for k in range(2 + i % 3)] for i in range(rows)]


def decorated(kind: type[Model]) -> Model:
    made: Any = type(kind.__name__, (kind,), {"forward": fxbatch.autobatch(adaptive=False)(kind.forward)})
    torch.manual_seed(0)
    return made()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "kind",
    [InFunctions, InModules, OfMatrices, WithoutGradients, TakenBothWays, ByTensors, Elsewhere],
)
def test_values_and_gradients(kind: type[Model]) -> None:
    model = decorated(kind)
    for _ in range(3):  # rows are looked up from the moment on at which many were met
        check_equal(model, *minibatch())


@pytest.mark.parametrize("kind", [InFunctions, InModules])
def test_other_rows_share_their_steps(kind: type[Model]) -> None:
    model = decorated(kind)
    forward: Callable[..., Any] = model.forward
    forward(*minibatch())
    few, many = ([[r] * 3 for r in rows] for rows in ([0, 1, 2], list(range(9))))
    forward(list(torch.randn(len(many), 4)), many)  # more than `MANY_ROWS` rows of each parameter were met
    launches = [
        fxbatch.explain(forward, list(torch.randn(len(rows), 4)), rows).launches_after for rows in (few, many)
    ]
    assert launches[0] == launches[1]


class Beside(Model):
    def forward(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        return torch.cat([torch.tanh(x), self.table[rows[0]]])


def test_a_function_on_a_row_is_shown_by_its_name() -> None:
    operations = fxbatch.explain(decorated(Beside), list(torch.randn(2, 4)), [[2], [2]]).operations
    assert [o.signature for o in operations if o.operation == "cat"] == [
        "cat(f32[4]; cat, 1, 4, 1, 8, False, False) -> (f32[8])"
    ]


def looked_up(model: Model) -> int:
    engine = model.forward.__fxbatch__.engine(model)  # type: ignore[attr-defined]
    return sum(s.operation.target is take_parameter_row for s in engine.table.signatures)


class Fresh(Model):
    """States that begin as plain data, matrices by number."""

    def forward(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        x = value(x)
        for row in rows:
            assert torch.zeros.__name__ == "zeros"
            h = torch.zeros(4, dtype=torch.float32) + torch.tensor([1.0, 2, 3, 4])
            x = torch.tanh(self.matrices[row] @ x + h)
        return x


@pytest.mark.skipif(_fast is None, reason="without the extension all passes Python")
def test_rows_that_were_asked_for_and_factories_of_plain_data_pass_no_python() -> None:
    model, x, rows = Fresh(), list(torch.randn(5, 4)), [1, 2] * 6
    f = fxbatch.autobatch(adaptive=False)(model.forward)
    met: dict[object, int] = {}

    def count(frame: Any, event: str, _: object) -> None:
        if event == "call":
            met[frame.f_code] = met.get(frame.f_code, 0) + 1

    for _ in range(3):
        met.clear()
        sys.setprofile(count)
        try:
            y = f(x, [rows] * 5)
        finally:
            sys.setprofile(None)
    torch.testing.assert_close(y, torch.stack([model(each, rows) for each in x]))
    assert met[arguments.bare_function.__code__] == 2, "a row each"
    assert torch_patches._with_real_tensors.__code__ not in met
    with_value = fxbatch.autobatch(adaptive=False)(lambda x: torch.tensor([value(x).sum(), 1.0]))
    torch.testing.assert_close(with_value(x)[:, 0], torch.stack([each.sum() for each in x]))


class RowsByNumber(Model):
    """Rows of a table by numbers, some counted from the end; one may be written to, or not be there."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 4)

    def forward(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        h = x
        for r in rows:
            row = self.embed.weight[abs(r)]
            if r < 0:
                row = self.embed.weight[r]
            if r == 39:
                row.mul_(2)  # of the table, which all share
            h = torch.tanh(h + row)
        return h


def test_rows_of_a_table_by_other_numbers() -> None:
    model = decorated(RowsByNumber)
    x = list(torch.randn(6, 4))
    batches = [[[(7 * i + 3 * k + step) % 39 for k in range(5)] for i in range(6)] for step in range(4)]
    for rows in batches[:3]:
        check_equal(model, x, rows)
    y = model(x, batches[3])
    torch.testing.assert_close(y, torch.stack([_alone(model, *z) for z in zip(x, batches[3])]))
    check_equal(model, x, [[3, -1, 0, -39], [5], [], [38, -2], [0], [1, 2]])
    with pytest.raises(IndexError, match="out of bounds"):
        model(x, [[3], [40], [1], [2], [3], [4]])
    for _ in range(2):
        with torch.no_grad(), pytest.raises(InPlaceError, match=r"written to|writes through a view"):
            model(x, [[39], [2], [1], [2], [3], [4]])


def _alone(model: Any, x: torch.Tensor, rows: Rows) -> torch.Tensor:
    with fxbatch.disabled():
        out: torch.Tensor = model([x], [rows])[0]
    return out


def test_few_rows_and_matrices_stay_views() -> None:
    few = decorated(InModules)
    few(list(torch.randn(MANY_ROWS, 4)), [[r] for r in range(MANY_ROWS)])
    many = decorated(OfMatrices)
    many(*minibatch())
    many(*minibatch())
    assert looked_up(few) == looked_up(many) == 0


class OfBuffer(Model):
    """Few rows of a buffer, and a part of it."""

    def forward(self, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        x = value(x)
        for row in rows:
            x = torch.tanh(x + self.places[row]) * self.places[row, 1:2]
        return x


def test_few_rows_of_a_buffer_are_told_by_their_place_the_second_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, asked = decorated(OfBuffer), []
    through_views = calls._through_views
    monkeypatch.setattr(calls, "_through_views", lambda *args: (asked.append(args), through_views(*args))[1])
    for rows, new in [(3, 6), (3, 0), (MANY_ROWS, 2), (MANY_ROWS, 0)]:
        asked.clear()
        given = list(torch.randn(8, 4)), [[i % rows, (i + 1) % rows] for i in range(8)]
        with torch.no_grad():
            check_equal(model, *given)
        assert (len(asked) == new) if new else not asked
    model.places[2:4] = 1.0  # written to between calls
    check_equal(model, *given)
    rows = [[i, 8 - i] for i in range(8)]  # from here on all are looked up
    check_equal(model, list(torch.randn(8, 4)), rows)
    assert looked_up(model)


def test_a_row_that_is_written_to_is_refused() -> None:
    class Writing(Model):
        @fxbatch.autobatch(adaptive=False)
        def forward(self, x: torch.Tensor, row: int) -> torch.Tensor:
            y = x + self.table[row]
            with torch.no_grad():
                self.table[row].add_(y)
            return y

    model = Writing()
    with pytest.raises(BatchCoupledError, match="writes to a parameter"):
        model(list(torch.randn(9, 4)), list(range(9)))


def test_a_parameter_that_moves_between_phases_is_read_anew() -> None:
    def forward(self: Model, x: torch.Tensor, rows: Rows) -> torch.Tensor:
        for k, row in enumerate(rows):
            x = torch.tanh(x + self.table[row])
            if x.sum().item() > 1e9:
                break
            if k == 2:
                self.table.data = self.table.data.flip(0)
        return x

    torch.manual_seed(0)
    model, alone = Model(), Model()
    alone.load_state_dict(model.state_dict())
    batched = fxbatch.autobatch(adaptive=False)(forward).__get__(model)
    with torch.no_grad():
        for _ in range(2):
            x, rows = torch.randn(4), [1, 2, 3, 4, 5, 6, 1]
            torch.testing.assert_close(batched([x], [rows])[0], forward(alone, x, rows))
