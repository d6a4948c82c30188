"""Functions of torch that were met are recorded at once, and are torch's own in all but `is`."""

from __future__ import annotations

import ast
import copy
import pickle
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import BuiltinFunctionType
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import fxbatch
from fxbatch.trace.state import _fast
from fxbatch.trace.values import Value
from tests.oracle import check_equal

needs_c = pytest.mark.skipif(_fast is None, reason="the extension stands for torch's functions")
FUNCTIONS = {torch.tanh: "tanh", torch.sigmoid: "sigmoid"}


class Cell(nn.Module):
    """A recurrent cell by functions of torch; what it sees of them is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(8, 4), nn.Linear(4, 4)
        self.seen: list[Any] = []

    @fxbatch.autobatch(adaptive=False)
    def forward(self, xs: torch.Tensor) -> torch.Tensor:
        h = xs.new_zeros(4)
        for x in xs:
            h = torch.tanh(self.inner(torch.cat([x, h], -1))) * torch.sigmoid(self.outer(h))
        if not self.seen:
            self.seen += [torch.tanh, torch.zeros]
        return torch.nn.functional.gelu(h)


def sentences(count: int = 5) -> list[torch.Tensor]:
    return [torch.randn(2 + i % 4, 4) for i in range(count)]


def test_values_and_gradients_are_those_of_the_loop() -> None:
    model = Cell()
    for _ in range(3):
        check_equal(model, sentences())


@needs_c
def test_functions_that_were_met_are_not_asked_for_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Cell()
    asked: list[object] = []
    with torch.no_grad():
        for _ in range(2):
            model(sentences())

        def counted(function: object, types: object, args: Any = (), kwargs: Any = None) -> object:
            asked.append(function)
            return _fast.torch_function(function, types, args, kwargs or {})

        monkeypatch.setattr(Value, "__torch_function__", counted)
        model(sentences())
    assert not asked


@needs_c
def test_what_stands_for_a_function_is_as_torchs_own() -> None:
    model = Cell()
    with torch.no_grad():
        model(sentences())
        model.seen.clear()
        model(sentences())
    seen, zeros = model.seen
    assert zeros is not torch.zeros
    assert zeros == torch.zeros
    assert torch.equal(zeros(3), torch.zeros(3))
    assert seen is not torch.tanh
    assert seen == torch.tanh
    assert torch.tanh == seen
    assert seen != torch.sigmoid
    assert FUNCTIONS[seen] == "tanh"
    assert isinstance(seen, BuiltinFunctionType)
    assert (seen.__name__, seen.__doc__, repr(seen)) == ("tanh", torch.tanh.__doc__, repr(torch.tanh))
    assert copy.deepcopy(seen) is torch.tanh
    assert pickle.loads(pickle.dumps(seen)) is torch.tanh
    x = torch.randn(3, requires_grad=True)
    assert torch.equal(seen(x), torch.tanh(x))
    with pytest.raises(TypeError):
        seen(x, x)


class Pair(NamedTuple):
    a: Any
    b: Any


@pytest.mark.parametrize("kind", [list, tuple, deque, lambda xs: Pair(*xs), lambda xs: [[xs[0]], [xs[1]]]])
def test_contents_of_factories_are_read_in_all_that_holds_them(kind: Callable[[list[Any]], Any]) -> None:
    class Copies(Cell):
        @fxbatch.autobatch(adaptive=False)
        def forward(self, xs: torch.Tensor) -> torch.Tensor:
            h = self.outer(xs[0])
            return h * torch.tensor(kind([h[0].detach(), 2.0]), dtype=h.dtype).sum()

    model = Copies()
    for _ in range(3):
        check_equal(model, sentences())


@needs_c
def test_torchs_own_are_there_afterwards_and_for_other_threads() -> None:
    plain, results = torch.tanh, []

    class Asking(Cell):
        @fxbatch.autobatch(adaptive=False)
        def forward(self, xs: torch.Tensor) -> torch.Tensor:
            other = threading.Thread(target=lambda: results.append(torch.tanh(torch.ones(2))))
            other.start()
            other.join()
            return torch.tanh(self.outer(xs[0]))

    model = Asking()
    with torch.no_grad():
        for _ in range(2):
            model(sentences())
            assert torch.tanh is plain
    assert all(torch.equal(r, torch.ones(2).tanh()) for r in results)


@needs_c
def test_code_that_another_thread_compiled_is_compiled_once_more_at_most() -> None:
    graphs, results = [], []

    def counting(graph: Any, _: object) -> Any:
        graphs.append(graph)
        return graph

    @torch.compile(backend=counting, fullgraph=True)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) + torch.cat([x, x])[:2]

    class Asking(Cell):
        @fxbatch.autobatch(adaptive=False)
        def forward(self, xs: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(torch.cat([self.outer(xs[0]), xs[1]]))
            other = threading.Thread(target=lambda: results.append(compiled(torch.ones(2))))
            other.start()
            other.join()
            return h

    model = Asking()
    with torch.no_grad():
        for _ in range(4):
            model(sentences())
            results.append(compiled(torch.ones(2)))
    assert len(graphs) <= 2
    assert len(results) == 4 * 6
    assert all(torch.equal(r, torch.ones(2).tanh() + 1) for r in results)


def test_a_function_that_is_left_on_the_module_is_used_later() -> None:
    class Chooses(Cell):
        act: Any = None

        @fxbatch.autobatch(adaptive=False)
        def forward(self, xs: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(self.outer(xs[0]))
            self.act = torch.tanh
            return self.act(h) if self.act == torch.tanh else h

    model = Chooses()
    for _ in range(3):
        check_equal(model, sentences())
    x = torch.randn(4)
    assert torch.equal(model.act(x), torch.tanh(x))
    assert torch.equal(copy.deepcopy(model).act(x), torch.tanh(x))


def test_no_code_of_ours_compares_functions_of_torch_by_identity() -> None:
    homes = {"torch": torch, "F": torch.nn.functional}
    lines = []
    for file in sorted(Path(fxbatch.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Is, ast.IsNot)):
                for x in (node.left, *node.comparators):
                    home = homes.get(ast.unparse(x.value)) if isinstance(x, ast.Attribute) else None
                    if home and isinstance(getattr(home, x.attr, None), BuiltinFunctionType):
                        lines.append(f"{file.name}:{node.lineno} {ast.unparse(node)}")
    assert not lines


@pytest.mark.filterwarnings("ignore:where received a uint8")
def test_where_by_bytes_is_recorded() -> None:
    """Masks of uint8, as CRFs keep them: torch takes them, fake tensors refuse."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.step = nn.Linear(4, 4)

        @fxbatch.autobatch(adaptive=False)
        def forward(self, xs: torch.Tensor) -> torch.Tensor:
            mask = torch.ones(len(xs), 1, dtype=torch.uint8)
            mask[-1] = 0
            score = self.step(xs[0])
            for x, keep in zip(xs[1:], mask[1:], strict=True):
                score = torch.where(keep, torch.tanh(self.step(score + x)), score)
            score += self.step.bias
            return score

    model = Masked()
    check_equal(model, sentences())
    explanation = fxbatch.explain(model, sentences())
    assert not explanation.unbatched and "phases" not in str(explanation)
