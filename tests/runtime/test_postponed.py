"""Graphs of operations that come many at once are built when they have been met often enough."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxbatch
from fxbatch import ir
from fxbatch.runtime import operation_cache as module
from fxbatch.runtime.operation_cache import ENOUGH_CALLS, MANY_NEW, REASON, CompiledOperation, MetSignatures
from tests.oracle import check_equal


def signatures(count: int) -> list[ir.Signature]:
    kind = ir.TensorSpec((2,), torch.float32, torch.device("cpu"))
    operation = ir.Operation("relu", "function", torch.relu)
    return [ir.Signature(operation, (kind,), (kind,)) for _ in range(count)]


def test_few_are_built_at_once_and_many_wait_for_their_turn() -> None:
    found = signatures(MANY_NEW + 2)
    met = MetSignatures()
    assert met.put_off(found[:MANY_NEW], [1] * MANY_NEW) == frozenset()
    met = MetSignatures()
    assert met.put_off(found[:-1], [3] * (MANY_NEW + 1)) == frozenset(range(MANY_NEW + 1))
    assert met.put_off(found[-1:], [1]) == {0}  # one more shape of a model that has had many
    assert met.put_off(found[:2], [ENOUGH_CALLS, 1]) == {0, 1}
    assert met.put_off(found[:2], [1, 1]) == {1}  # the first has earned its graphs
    assert met.put_off(found[:2], [1, 0]) == frozenset()


def test_all_are_built_where_nothing_waits_any_more() -> None:
    found = signatures(MANY_NEW + 1)
    met = MetSignatures()
    assert met.put_off(found, [ENOUGH_CALLS] * len(found)) == frozenset(range(len(found)))
    assert met.put_off(signatures(1), [1]) == frozenset()


def test_tables_are_bounded() -> None:
    met = MetSignatures(most=10)
    met.put_off(signatures(MANY_NEW + 5), [1] * (MANY_NEW + 5))
    assert len(met) == 10


class Sentence:
    """An object with a `__new__` of its own: a forward that takes one is recorded, and not packed whole."""

    x: torch.Tensor

    def __new__(cls, *given: torch.Tensor) -> Sentence:
        made = super().__new__(cls)
        if given:  # no copy, which is made without
            (made.x,) = given
        return made


class Shapes(nn.Module):
    """A tensor of the sentence's length, which no submodule makes: each length makes signatures of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)
        self.out = nn.Linear(4, 2)

    @fxbatch.autobatch
    def forward(self, sentence: Sentence) -> torch.Tensor:
        h = torch.tanh(self.inner(sentence.x[0])).expand(len(sentence.x), 4)
        return self.out((h * torch.softmax(h, dim=0)).sum(0))


def built(model: nn.Module) -> list[CompiledOperation]:
    """What has graphs of the operation that each length has its own of."""
    operations = model.forward.__func__.__fxbatch__.engine(model).operations._entries.values()
    return [x for x in operations if x.graphs is not None and x.signature.operation.name == "softmax"]


def test_many_shapes_run_call_by_call_and_are_built_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MANY_NEW", 5)
    monkeypatch.setattr(module, "ENOUGH_CALLS", 4)
    torch.manual_seed(0)
    data = [Sentence(torch.randn(n, 3)) for n in (1, 2, 3, 4, 5, 5)]
    model = Shapes()
    check_equal(model, data)
    first = len(built(model))
    model(data)
    assert first == 0
    for _ in range(3):
        model(data).sum().backward()
    assert built(model)
    assert all(REASON not in x.reason for x in built(model))
    check_equal(model, data)


def test_explain_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MANY_NEW", 5)
    report = fxbatch.explain(Shapes(), [Sentence(torch.randn(n, 3)) for n in range(1, 6)])
    assert any(REASON in row.reason for row in report.unbatched)
