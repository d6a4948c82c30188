"""A call that comes again passes no Python of ours, whatever is called and what it is given: lines of the recorder are
counted, of more steps and of fewer. And each form gives what the loop gives, values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fxbatch
from tests.lines import lines_of
from tests.oracle import check_equal

WIDTH = 4


class State(NamedTuple):
    h: Tensor
    c: Tensor


class StateWithMethod(NamedTuple):
    h: Tensor
    c: Tensor

    def both(self) -> Tensor:
        return torch.cat([self.h, self.c], -1)


class Node:
    def __init__(self, h: Tensor) -> None:
        self.h = h


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * WIDTH, WIDTH)

    def joined(self, *states: Tensor) -> Tensor:
        return torch.tanh(self.linear(torch.cat(states, -1)))


class OfList(Cell):
    def forward(self, states: list[Tensor]) -> Tensor:
        return torch.tanh(self.linear(torch.cat(states, -1)))


class OfTuple(Cell):
    def forward(self, states: tuple[Tensor, Tensor]) -> Tensor:
        return torch.tanh(self.linear(torch.cat(states, -1)))


class OfDict(Cell):
    def forward(self, states: dict[str, Tensor]) -> Tensor:
        return self.joined(states["h"], states["x"])


class OfNode(Cell):
    def forward(self, node: Node, x: Tensor) -> Tensor:
        return self.joined(node.h, x)


class OfState(Cell):
    def forward(self, x: Tensor, state: State) -> State:
        h = torch.tanh(self.linear(torch.cat([x, state.h], -1)))
        return State(h, h * state.c)


class OfStateWithMethod(Cell):
    def forward(self, state: StateWithMethod) -> StateWithMethod:
        h = torch.tanh(self.linear(state.both()))
        return StateWithMethod(h, h * state.c)


class GivesDict(Cell):
    def forward(self, h: Tensor, x: Tensor) -> dict[str, Any]:
        new = torch.tanh(self.linear(torch.cat([h, x], -1)))
        return {"h": new, "all": (new, [x * 2])}


class Optional(Cell):
    def forward(self, h: Tensor, x: Tensor | None = None) -> Tensor:
        return torch.tanh(self.linear(torch.cat([h, h if x is None else x], -1)))


class Recursive(Cell):
    def forward(self, node: Any, x: Tensor) -> Tensor:
        return x if node is None else self.joined(self(node.h, x), x)


Form = Callable[["Steps", Tensor, Tensor, int], Tensor]


class Steps(nn.Module):
    """h, x -> a form of one step, many times."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.form = form
        self.of_list, self.of_tuple, self.of_dict, self.of_node = OfList(), OfTuple(), OfDict(), OfNode()
        self.of_state, self.of_other, self.gives_dict = OfState(), OfStateWithMethod(), GivesDict()
        self.optional = Optional()
        self.lstm, self.cell, self.gru = (
            nn.LSTM(WIDTH, WIDTH),
            nn.LSTMCell(WIDTH, WIDTH),
            nn.GRUCell(WIDTH, WIDTH),
        )
        self.each = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.named = nn.ModuleDict({"a": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())})
        self.weight, self.nothing = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH)), nn.Dropout(0.0)
        self.identity = nn.Identity()
        self.register_buffer("scale", torch.rand(WIDTH))
        self.register_buffer("mask", torch.tensor([True, False] * (WIDTH // 2)))
        self.register_buffer("order", torch.arange(WIDTH).flip(0))
        self.register_buffer("factor", torch.tensor(0.5))

    @fxbatch.autobatch(adaptive=False, out="list")
    def forward(self, x: Tensor, steps: int) -> Tensor:
        h = x
        for i in range(steps):
            h = self.form(self, h, x, i)
        return h


def of_both(cell: nn.Module, h: Tensor, x: Tensor) -> Tensor:
    state = cell(StateWithMethod(h, x))
    return state.h + state.c


FORMS: dict[str, Form] = {
    "a list": lambda m, h, x, i: m.of_list([h, x]),
    "a tuple": lambda m, h, x, i: m.of_tuple((h, x)),
    "a dictionary": lambda m, h, x, i: m.of_dict({"h": h, "x": x}),
    "an object": lambda m, h, x, i: m.of_node(Node(h), x),
    "a named tuple": lambda m, h, x, i: m.of_state(x, State(h, x)).c,
    "a named tuple with a method": lambda m, h, x, i: of_both(m.of_other, h, x),
    "gives a dictionary": lambda m, h, x, i: m.gives_dict(h, x)["all"][0],
    "by name": lambda m, h, x, i: m.optional(h=h, x=x),
    "a default": lambda m, h, x, i: m.optional(h),
    "modules by number": lambda m, h, x, i: m.each[i % 2](h),
    "modules by name": lambda m, h, x, i: m.named["a"](h),
    "a layer's state": lambda m, h, x, i: m.lstm(h.view(1, 1, -1))[1][0].view(-1),
    "a cell's state": lambda m, h, x, i: m.cell(x, (h, x))[1],
    "a cell": lambda m, h, x, i: m.gru(x, h),
    "a column of a parameter": lambda m, h, x, i: h * m.weight[:, 1],
    "rows of a parameter": lambda m, h, x, i: h @ m.weight[:, WIDTH:] + m.weight[-1, :WIDTH],
    "the last part of a parameter": lambda m, h, x, i: h * m.weight[..., -1] * m.weight[None, 0, ::2],
    "other views of a parameter": lambda m, h, x, i: h * m.weight.unsqueeze(0)[0].narrow(1, 0, 1).t()[0],
    "a buffer": lambda m, h, x, i: m.each[0](h) * m.scale + m.factor,
    "buffers of other types": lambda m, h, x, i: torch.where(m.mask, m.each[0](h), x)[m.order].masked_fill(
        ~m.mask, 0.5
    ),
    "a part of a buffer": lambda m, h, x, i: m.each[0](h) * m.scale.view(2, -1).sum() * m.scale[1:2],
    "a cell that begins with buffers": lambda m, h, x, i: m.cell(m.each[0](h), (m.scale, m.scale))[0],
    "functions of a buffer alone": lambda m, h, x, i: m.each[0](h) + torch.cat([m.scale, m.scale])[:WIDTH],
    "dropout of nothing": lambda m, h, x, i: m.nothing(h) * 2,
    "an identity": lambda m, h, x, i: m.identity(h) * 2,
    "functions": lambda m, h, x, i: F.softmax(torch.stack([h, x]), dim=0).sum(0),
    "slices": lambda m, h, x, i: torch.cat([h[2:], h[..., :2]]),
    "rows": lambda m, h, x, i: torch.stack([h, x]).unbind(0)[i % 2] * h[None][0],
    "numbers": lambda m, h, x, i: (1 - h) * (i + 0.5) + 1 / (h * h + 1),
}

# Lines of the recorder that a step runs, to be lowered only: where results are neither one tensor nor a tuple of all,
# and where it is asked whether a view of a buffer is a row that is looked up.
LINES = {"a named tuple": 9, "gives a dictionary": 9, "a layer's state": 9, "a part of a buffer": 16}


def lines_of_a_step(model: Steps, *, grad: bool) -> float:
    """How many lines of the recorder's Python one step more of one instance runs."""
    lines, instances = [], 4
    with torch.set_grad_enabled(grad):
        for steps in (6, 26):
            batch = [torch.randn(WIDTH) for _ in range(instances)]
            for _ in range(3):
                model(batch, [steps] * instances)
            lines.append(lines_of(lambda: model(batch, [steps] * instances), "trace"))  # noqa: B023
    return (lines[1] - lines[0]) / (20 * instances)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", FORMS)
def test_a_call_that_comes_again_passes_no_python_of_ours(name: str, grad: bool, recorded_by: str) -> None:
    torch.manual_seed(0)
    lines = lines_of_a_step(Steps(FORMS[name]), grad=grad)
    assert recorded_by == "python" or lines <= LINES.get(name, 0) + 0.2, lines


@pytest.mark.parametrize("name", FORMS)
def test_each_form_is_as_the_loop(name: str) -> None:
    torch.manual_seed(0)
    model = Steps(FORMS[name])
    for _ in range(3):
        check_equal(model, list(torch.randn(3, WIDTH)), [1, 3, 5])


def test_modules_that_an_instance_makes_are_functions_of_torch() -> None:
    """Nothing is looked at again for one that another instance or step has made, and holds nothing."""

    def form(m: Steps, h: Tensor, x: Tensor, i: int) -> Tensor:
        loss = nn.NLLLoss()(nn.LogSoftmax(dim=0)(h), torch.tensor(i % WIDTH))
        return nn.Sigmoid()(m.each[0](h)) * loss + nn.CrossEntropyLoss(reduction="sum")(h, torch.tensor(1))

    torch.manual_seed(0)
    model = Steps(form)
    model(list(torch.randn(3, WIDTH)), [1, 3, 5])
    found = fxbatch.explain(model, list(torch.randn(3, WIDTH)), [1, 3, 5])
    assert not [reason for reason in str(found).splitlines() if "NLLLoss" in reason]
    for _ in range(3):
        check_equal(model, list(torch.randn(3, WIDTH)), [1, 3, 5])


def test_what_a_module_gives_back_is_the_object_that_it_was_given() -> None:
    """As in torch, and so is what is written to it; an instance's own tensor becomes a value, as by other modules."""

    def form(m: Steps, h: Tensor, x: Tensor, i: int) -> Tensor:
        h = m.each[0](h)
        assert m.nothing(h) is h
        m.nothing(h).mul_(2)
        return h + m.identity(x)

    torch.manual_seed(0)
    model = Steps(form)
    for _ in range(3):
        check_equal(model, list(torch.randn(3, WIDTH)), [1, 3, 5])


class OfNodes(nn.Module):
    """A module that is given the objects that it goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = Recursive()

    @fxbatch.autobatch(adaptive=False)
    def forward(self, depth: int, x: Tensor) -> Tensor:
        node: Any = None
        for _ in range(depth):
            node = Node(node)
        return self.cell(node, x)


def test_a_module_that_calls_itself_with_objects_is_as_the_loop() -> None:
    torch.manual_seed(0)
    for _ in range(3):
        check_equal(OfNodes(), [1, 4, 6], list(torch.randn(3, WIDTH)))
