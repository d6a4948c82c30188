"""Forwards with parameters of their own, and no module: what they do to plain tensors batches, and gives what the loop
gives."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import fxbatch
from fxbatch.trace import arguments
from tests.oracle import check_equal

D = 4


class Bare(nn.Module):
    """Parameters, and a function of an instance."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.w, self.u, self.b = (nn.Parameter(torch.randn(*s).double()) for s in ((D, D), (D, D), (D,)))
        self.table = nn.Parameter(torch.randn(9, D).double())
        self.relations = nn.Parameter(torch.randn(3, D, D).double())
        self.parts = nn.ParameterList([torch.randn(D).double() for _ in range(2)])
        self.register_buffer("first", torch.tensor(1))
        self.register_buffer("mean", torch.randn(D).double())
        self.linear, self.words = nn.Linear(D, D).double(), nn.Embedding(9, D).double()
        self.frozen = nn.Parameter(torch.randn(D, D).double(), requires_grad=False)
        self.function = function

    def one(self, x: Any) -> Any:
        return self.function(self, x)

    @fxbatch.autobatch
    def forward(self, x: Any) -> Any:
        return self.one(x)


def chain(m: Any, step: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], rows: Any) -> torch.Tensor:
    h = m.b
    for row in rows:
        h = step(h, row)
    return h


def rows(count: int) -> list[Any]:
    return [[torch.randn(D).double() for _ in range(1 + i % 3)] for i in range(count)]


def words(count: int) -> list[Any]:
    return [[(3 * i + k) % 9 for k in range(1 + i % 4)] for i in range(count)]


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return 2 * (x @ w)

    @staticmethod
    def backward(ctx: Any, *g: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return 2 * (g[0] @ w.t()), 2 * torch.outer(x, g[0])


def halting(m: Any, xs: Any) -> torch.Tensor:
    h, k = xs[0] @ m.w, 0
    while h.norm().item() > 1 and k < 4:
        h, k = (h @ m.u).tanh() * 0.7, k + 1
    return h + k


def kept_views(m: Any, xs: Any) -> torch.Tensor:
    w, (top, bottom) = m.w.t(), m.u.chunk(2)
    return torch.stack([torch.cat([top @ (w @ x), bottom @ x]) for x in xs]).sum(0)


FORWARDS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[int], list[Any]]]] = {
    "row @ weight": (lambda m, xs: chain(m, lambda h, x: torch.tanh(x @ m.w + h @ m.u + m.b), xs), rows),
    "weight @ row": (lambda m, xs: chain(m, lambda h, x: torch.tanh(m.w @ x + m.u @ h + m.b), xs), rows),
    "views": (lambda m, xs: chain(m, lambda h, x: torch.tanh(x @ m.w.t() + m.u.T @ h + m.b), xs), rows),
    "kept views": (kept_views, rows),
    "F.linear": (lambda m, xs: nn.functional.linear(xs[0], m.w, m.b).relu(), rows),
    "by name": (lambda m, xs: nn.functional.linear(input=xs[0], weight=m.w), rows),
    "torch.cat": (lambda m, xs: torch.cat([m.parts[0], xs[0], m.parts[1]]).tanh(), rows),
    "einsum": (lambda m, xs: torch.einsum("ij,j->i", m.w, xs[0]), rows),
    "frozen": (lambda m, xs: m.frozen @ xs[0], rows),
    "look-up": (lambda m, ws: chain(m, lambda h, w: torch.tanh(m.w @ m.table[w] + h), ws), words),
    "from the end": (lambda m, ws: (m.table[-1 - ws[0]] * m.b[-1] + m.b[ws[0] % D]).tanh(), words),
    "one item": (lambda m, ws: m.table[ws[0], ws[-1] % D] * m.table[ws[0], 1:], words),
    "integer tensors": (lambda m, ws: m.table[torch.tensor(ws[0])] + m.table[torch.tensor(ws)].sum(0), words),
    "integer tensors from the end": (lambda m, ws: m.table[torch.tensor(-1 - ws[0])] * m.b, words),
    "narrow integer tensors": (
        lambda m, ws: torch.stack([m.table[torch.tensor(ws[0], dtype=d)] for d in (torch.int32, torch.int8)]).sum(0),
        words,
    ),
    "a row of rows": (lambda m, ws: m.relations[torch.tensor(ws[0] % 3)] @ m.table[torch.tensor(ws[0])], words),
    "a layer's weight": (
        lambda m, xs: chain(m, lambda h, x: (m.linear.weight @ x + m.linear.bias + h).tanh(), xs),
        rows,
    ),
    "a layer, and its weight": (lambda m, xs: m.linear(xs[0]) @ m.linear.weight.t() + xs[0] @ m.linear.weight, rows),
    "an embedding's weight": (lambda m, ws: m.words.weight[torch.tensor(ws[0])] * m.words.weight[ws[-1]], words),
    "an embedding by its weight": (
        lambda m, ws: nn.functional.embedding(torch.tensor(ws), m.words.weight).sum(0),
        words,
    ),
    "a layer of a buffer": (lambda m, xs: m.words(m.first) * xs[0] * len(m.linear.weight.shape), rows),
    "embedding": (lambda m, ws: nn.functional.embedding(torch.tensor(ws[0]), m.table), words),
    "relations": (lambda m, ws: m.relations[ws[0] % 3] @ m.table[ws[0]], words),
    "items of rows": (lambda m, ws: torch.stack([m.w[w % D][1] + m.table[w] for w in ws]).sum(0), words),
    "conditions": (halting, rows),
    "parameters alone": (lambda m, xs: m.w.exp() @ m.b + xs[0], rows),
    "a function of one's own": (lambda m, xs: Doubled.apply(xs[0], m.w), rows),
    "vmap": (lambda m, xs: torch.func.vmap(lambda x: m.w @ x)(torch.stack(xs)).sum(0), rows),
    "grad": (lambda m, xs: torch.func.grad(lambda x: (m.w @ x).sum())(xs[0]) * (xs[0] @ m.u), rows),
    "data": (lambda m, xs: xs[0] @ m.w.data + m.b, rows),
    "no gradients": (lambda m, xs: xs[0] @ m.u + without_gradients(m, xs[0]), rows),
    "a buffer": (lambda m, xs: (xs[0] - m.mean) @ m.w + m.b * m.mean, rows),
    "its class": (lambda m, xs: (m.w @ xs[0]) * (2 if isinstance(m.w, nn.Parameter) else 1) * len(m.w), rows),
    "copies": (lambda m, xs: copy.deepcopy(m.w) @ xs[0] + pickle.loads(pickle.dumps(m.b.detach())), rows),
    "written": (lambda m, xs: xs[0].clone().add_(m.b).mul_(m.parts[0]), rows),
    "masks": (lambda m, xs: m.w[xs[0] > 0].sum(0) + m.b[m.b > 0].sum() * xs[0], rows),
    "one and true": (lambda m, xs: (m.b[1] + m.b[True].sum() + m.w[1:][True]).sum() * xs[0], rows),
    "comparisons": (lambda m, xs: xs[0] * (2 if torch.equal(xs[0], m.b) else 3) + m.b, rows),
    "detached": (lambda m, xs: xs[0] @ m.w.detach() + m.w[0].detach() + m.w.t().detach() @ m.b, rows),
    "type of": (lambda m, xs: xs[0].to(m.w) @ m.w.to(xs[0].dtype), rows),
}  # fmt: skip


def without_gradients(m: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return (m.w @ x).tanh()


@pytest.mark.parametrize("name", FORWARDS)
def test_equal_to_the_loop(name: str) -> None:
    function, data = FORWARDS[name]
    model = Bare(function)
    for grad in (True, True, False):
        for p in model.parameters():
            p.grad = None
        minibatch = data(7)
        with torch.set_grad_enabled(grad):
            found = model(minibatch)
            wanted = torch.stack([model.one(x) for x in minibatch])
        torch.testing.assert_close(found, wanted)
        if grad and wanted.requires_grad:
            weights = torch.randn_like(wanted)
            parameters = [p for p in model.parameters() if p.requires_grad]
            (found * weights).sum().backward()
            by_hand = torch.autograd.grad((wanted * weights).sum(), parameters, allow_unused=True)
            for p, g in zip(parameters, by_hand, strict=True):
                torch.testing.assert_close(p.grad, g)
        assert {type(p) for p in model.parameters()} == {nn.Parameter}


@pytest.mark.parametrize("name", [
    "row @ weight", "weight @ row", "views", "look-up", "one item", "F.linear", "a layer's weight",
    "a layer, and its weight", "an embedding's weight", "an embedding by its weight", "integer tensors from the end",
])  # fmt: skip
def test_batches(name: str) -> None:
    function, data = FORWARDS[name]
    found = fxbatch.explain(Bare(function), data(12))
    assert 0 < 2 * found.launches_after <= found.launches_before


def test_calls_met_before_are_recorded_in_c(recorded_by: str) -> None:
    asked: list[Any] = []

    asks = arguments._is_recorded  # of calls that C does not know

    def counted(*given: Any) -> bool:
        asked.append(given)
        return asks(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fxbatch.trace.arguments._is_recorded", counted)
        step = lambda m, h, x: (x @ m.w + m.u @ x + x @ m.w.t() + m.table[n]).tanh() + h  # noqa: E731
        n = torch.tensor(3)
        model = Bare(lambda m, xs: chain(m, lambda h, x: step(m, h, x), xs))
        model(rows(3))
        asked.clear()
        model([[torch.randn(D).double() for _ in range(20)] for _ in range(5)])
    assert len(asked) <= 1 or recorded_by == "python"  # for the view's own making


def test_a_layer_that_meets_a_buffer_alone_is_not_asked_whether_it_is_recorded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    asks = arguments._is_recorded
    monkeypatch.setattr(arguments, "_is_recorded", lambda *given: (asked.append(given), asks(*given))[1])
    model = Bare(FORWARDS["a layer of a buffer"][0])
    with torch.no_grad():
        for _ in range(3):
            model(rows(7))
    assert not asked


def test_a_checkpoint_of_plain_tensors_has_its_gradients() -> None:
    """The older kind, which runs without gradients, and again with them in backward; it fills `grad` alone."""

    def part(m: Any, xs: Any) -> Any:
        function = lambda x: torch.tanh(m.linear(x) @ m.w + x @ m.linear.weight)  # noqa: E731
        return checkpoint(function, xs[0].clone().requires_grad_(), use_reentrant=True)

    model, minibatch = Bare(part), rows(5)
    gradients = []
    for forward in (model, lambda batch: torch.stack([model.one(x) for x in batch])):
        model.zero_grad()
        forward(minibatch).square().sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert sum(g is not None for g in gradients[0]) == 3
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("row", [9, -10])
def test_a_row_that_a_table_does_not_have(row: int) -> None:
    model = Bare(lambda m, w: m.words.weight[w] * m.b)
    model([torch.tensor(w) for w in range(4)])
    with pytest.raises(IndexError):
        model([torch.tensor(w) for w in (1, row, 3)])


def test_what_torch_refuses() -> None:
    for wrong, error in (
        (lambda m, ws: m.table[9 + ws[0]], IndexError),
        (lambda m, ws: m.w @ torch.zeros(D + 1).double(), RuntimeError),
        (lambda m, ws: m.w.nothing, AttributeError),
    ):
        model = Bare(wrong)
        with pytest.raises(error):
            model.one([0])
        with pytest.raises(error):
            model(words(3))
        assert {type(p) for p in model.parameters()} == {nn.Parameter}


def test_views_that_are_kept_are_plain_afterwards() -> None:
    kept: list[torch.Tensor] = []

    def keeps(m: Any, xs: Any) -> torch.Tensor:
        kept.append(m.w.t())
        return kept[-1] @ xs[0]

    model = Bare(keeps)
    model(rows(3))
    assert {type(x) for x in kept} == {torch.Tensor} and all(not vars(x) for x in kept)
    assert kept[0]._base is model.w


def test_a_view_is_a_result() -> None:
    model = Bare(lambda m, xs: m.table[2:4])
    result = model(rows(3))
    torch.testing.assert_close(result, model.table[2:4].expand(3, 2, D))
    assert type(result) is torch.Tensor


@pytest.mark.parametrize("grad", [True, False])
def test_traces_keep_nothing_that_was_computed_of_parameters(grad: bool) -> None:
    model = Bare(lambda m, ws: m.w.exp() @ m.b if len(ws) < 2 else m.w @ m.table[ws[0]])
    data = words(8)
    with torch.set_grad_enabled(grad):
        traced = fxbatch.TracedDataset(model, data)
        for _ in range(2):
            found = model([traced[i] for i in range(8)])
            torch.testing.assert_close(found, torch.stack([model.one(x) for x in data]))
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(0.5)


def test_another_parameter_in_its_place() -> None:
    model = Bare(FORWARDS["views"][0])
    for _ in range(3):
        minibatch = rows(5)
        torch.testing.assert_close(model(minibatch), torch.stack([model.one(x) for x in minibatch]))
        with torch.no_grad():
            model.w.data = torch.randn(D, D).double()
        model.u = nn.Parameter(torch.randn(D, D).double())


def test_the_loop_in_another_thread() -> None:
    model, minibatch = Bare(FORWARDS["views"][0]), rows(6)
    wanted = torch.stack([model.one(x) for x in minibatch])
    found: list[torch.Tensor] = []
    stop = threading.Event()

    def loop() -> None:
        while not stop.is_set():
            found.append(torch.stack([model.one(x) for x in minibatch]))

    thread = threading.Thread(target=loop)
    thread.start()
    for _ in range(20):
        torch.testing.assert_close(model(minibatch), wanted)
    stop.set()
    thread.join()
    assert found and all(torch.equal(x, wanted) for x in found)


class Normalised(nn.Module):
    """A concept's embedding, normalised at each use; a copy of it that is written to; a scale that Python looks at."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(5, D))
        self.scale = nn.Parameter(torch.zeros(()))
        self.layer = nn.Linear(D, D)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.layer(x)
        for _ in range(6):
            unit = self.embedding / self.embedding.norm(2, dim=-1, keepdim=True)
            weights = torch.softmax(self.embedding, 0)
            doubled = self.embedding * 2
            other = self.embedding * 2
            doubled[0] = h
            doubled += 1
            h = h + (unit @ h).softmax(0) @ weights + doubled.sum(0) + other.sum(0)
            if self.scale.exp() > 0.5:
                h = h * self.scale.exp()
        return h, weights


@pytest.mark.parametrize("grad", [True, False])
def test_what_is_computed_of_parameters_alone_again_and_again_is_computed_once(
    grad: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    decorated = fxbatch.autobatch(adaptive=False, out="list")(Normalised.forward)
    batched: Any = type("Batched", (Normalised,), {"forward": decorated})()
    with torch.set_grad_enabled(grad):
        for _ in range(3):
            check_equal(batched, list(torch.randn(6, D)))
    minibatch = fxbatch.compile_minibatch(batched, list(torch.randn(6, D)))
    assert len(minibatch.phases) == 1, "nobody waits for a number of parameters alone"
    program = minibatch.program
    norms = [s for s, x in enumerate(program.signatures) if x.name in ("norm", "softmax") and not x.inputs]
    assert len(norms) == 2
    if arguments._fast is not None:
        assert all((program.sig == s).sum() == 1 for s in norms)


def test_random_numbers_of_parameters_are_drawn_anew() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(500))

        @fxbatch.autobatch(adaptive=False)
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.stack([torch.dropout(self.w, 0.5, True) * x for _ in range(12)])

    model = Model()
    for _ in range(3):
        drawn = model(list(torch.ones(4, 1))).flatten(0, 1)
        assert len(drawn.unique(dim=0)) == len(drawn)


def test_what_parameters_alone_give_is_read_without_a_wait() -> None:
    """It was read as a value again, and again, until Python's stack was full."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.randn(3, D))
            self.layer = nn.Linear(D, D)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.layer(x)
            for _ in range(12):
                h = h + torch.softmax(self.weights, 0).sum(0)
            if torch.softmax(self.weights, 0).argmax() > 99:
                h = h * 2
            return (
                h
                * torch.softmax(self.weights, 0).tolist()[0][0]
                * torch.softmax(self.weights, 1).numpy()[0, 0]
            )

    batched: Any = type("Batched", (Model,), {"forward": fxbatch.autobatch(adaptive=False)(Model.forward)})()
    with torch.no_grad():
        for _ in range(3):
            check_equal(batched, list(torch.randn(6, D)), gradients=False)
