"""A decorated forward whose instances are tensors of their own sizes: packed, and equal to the loop."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.autograd import Variable

import fxbatch
from fxbatch.errors import ResultError
from fxbatch.ragged import symbolic
from fxbatch.runtime import packed_forward, packed_route
from fxbatch.runtime.forward_code import ForwardCode
from fxbatch.runtime.options import Options
from fxbatch.runtime.packed_forward import PackedForward
from fxbatch.runtime.packed_route import PackedRoute
from fxbatch.trace import operations, state
from fxbatch.trace.state import sizes_of
from tests.oracle import assert_same, check_equal
from tests.trust.programs import model


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, 3)

    @fxbatch.autobatch(out="list")
    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.encoder(self.embed(words)))


class Mean(nn.Module):
    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.out = nn.Linear(8, 3)

    @fxbatch.autobatch
    def forward(self, words: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.embed(words).mean(0) * self.scale
        return {"logits": self.out(h), "h": h}


def words(*sizes: int) -> list[torch.Tensor]:
    return [torch.randint(50, (n,)) for n in sizes]


def route_of(model: nn.Module) -> PackedRoute:
    found = next(iter(model.__dict__["_fxbatch_engines"].values())).packed
    assert isinstance(found, PackedRoute)
    return found


def packed_of(model: nn.Module) -> PackedForward:
    found = route_of(model).forward
    assert isinstance(found, PackedForward)
    return found


def variants_of(model: nn.Module) -> list[Any]:
    """The packed functions of a model's forward; none where nothing was built for it."""
    packed = route_of(model).forward
    return [] if packed is None else [v for f in packed.families.values() for v in f.variants]


def compare(model: nn.Module, batch: Any) -> None:
    found = model(batch)
    model.zero_grad()
    sum(t.square().sum() for t in torch.utils._pytree.tree_leaves(found)).backward()
    ours = [p.grad for p in model.parameters()]
    with fxbatch.disabled():
        expected = model(batch)
    model.zero_grad()
    sum(t.square().sum() for t in torch.utils._pytree.tree_leaves(expected)).backward()
    assert_same(found, expected)
    assert_same(ours, [p.grad for p in model.parameters()])


@pytest.fixture
def mean() -> Mean:
    torch.manual_seed(0)
    return Mean().double()


def test_one_graph_for_all_sizes(mean: Mean) -> None:
    for sizes in ((3, 5, 2), (1, 9, 4, 4), (30, 31, 7), (2, 2)):
        compare(mean, words(*sizes))
    assert len(variants_of(mean)) == 1
    assert variants_of(mean)[0].calls == 4


def test_results_of_own_sizes_as_a_list() -> None:
    torch.manual_seed(0)
    model = Tagger().double()
    compare(model, words(3, 5, 1, 4))
    assert len(variants_of(model)) == 1


def test_stacking_results_of_own_sizes_names_them() -> None:
    class Rows(Mean):
        @fxbatch.autobatch
        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.embed(words)

    with pytest.raises(ResultError, match=r"instance 0 gave \[3, 8\], instance 1 gave \[5, 8\]"):
        Rows()(words(3, 5))


def test_what_the_forward_reads_is_compared(mean: Mean) -> None:
    batch = words(3, 5, 2)
    compare(mean, batch)
    mean.scale = 3.0
    compare(mean, batch)
    assert len(variants_of(mean)) == 2


def test_a_branch_on_the_size_gets_a_graph_of_its_own() -> None:
    class Branch(Mean):
        @fxbatch.autobatch
        def forward(self, words: torch.Tensor) -> torch.Tensor:
            x = self.embed(words)
            return x.sum(0) if len(words) > 4 else x.mean(0) * 2

    torch.manual_seed(0)
    model = Branch().double()
    compare(model, words(3, 9, 1, 4, 6, 5))
    assert len(variants_of(model)) == 2


def _traces(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    plain = symbolic._trace
    monkeypatch.setattr(symbolic, "_trace", lambda *given, **how: found.append(1) or plain(*given, **how))
    return found


def test_code_that_does_something_else_for_each_size_is_traced_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = model(lambda self, x: (x * math.exp(-len(x) / 10)).tanh().sum(0), adaptive=False)
    traces = _traces(monkeypatch)
    for _ in range(3):
        check_equal(made, [torch.randn(t, 8) for t in range(10, 27)], gradients=False)
    assert not sum(v.calls for v in variants_of(made))
    assert (
        len(traces) == 4 + symbolic.FAILED
    )  # by symbols for their sizes, then by numbers, twice each; other sizes


OLD: dict[str, Any] = {
    "Variable": lambda self, h: Variable(h),
    "Variable in a branch": lambda self, h: Variable(h) if self.static else h,
    "data": lambda self, h: h * h.data.max(),
    "a parameter's kind": lambda self, h: h + next(self.parameters()).data.new(4).fill_(1.0),
    "LongTensor": lambda self, h: h[torch.LongTensor([1, 0])] + torch.FloatTensor([1, 2, 3, 4]).type_as(h),
}


@pytest.mark.parametrize("old", OLD)
def test_code_of_2017_is_packed(old: str) -> None:
    form = OLD[old]

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return form(self, self.l(x)).sum(0) + self.k(x).sum(0)

    parts = {"l": nn.Linear(8, 4), "k": nn.Linear(8, 4)}
    made = model(forward, parts, adaptive=False)
    made.static = True
    made.double()
    check_equal(made, [torch.randn(t, 8, dtype=torch.float64) for t in (4, 7, 3, 6)])
    assert sum(v.calls for v in variants_of(made))


def test_a_loop_over_the_rows_is_not_traced_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three sizes make three numbers of calls: that needs no symbols."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = x[0]
        for row in x[1:]:
            h = torch.tanh(self.l(h) + row)
        return h

    made = model(forward, {"l": nn.Linear(8, 8)}, adaptive=False)
    traces, fakes = _traces(monkeypatch), []
    plain = packed_forward.run_on_fakes
    on_fakes = operations._run_on_fakes

    def counted(*args: Any, **kwargs: Any) -> Any:
        with monkeypatch.context() as within:
            within.setattr(operations, "_run_on_fakes", lambda *a, **k: fakes.append(a) or on_fakes(*a, **k))
            return plain(*args, **kwargs)

    monkeypatch.setattr(packed_forward, "run_on_fakes", counted)
    check_equal(made, [torch.randn(t, 8) for t in (4, 7, 3, 6)])
    assert not traces
    assert not fakes  # tensors without memory say as much


def test_instances_that_the_first_graph_is_not_for_get_another() -> None:
    made = model(
        lambda self, x: self.l(x).sum(0) if len(x) > 4 else self.l(x).mean(0), {"l": nn.Linear(8, 4)}
    )
    batch = [torch.randn(t, 8) for t in (2, 3, 4, 5, 6, 7)]
    instances = [((made, x), {}) for x in batch]
    packed = PackedForward(ForwardCode(Options(), made))
    fn = type(made).forward.__wrapped__
    (found,) = packed.call(fn, instances, "list") or ((),)
    assert_same(list(found), [fn(made, x) for x in batch])
    (family,) = packed.families.values()
    assert (len(family.variants), family.built, family.alone) == (2, 2, 0)


def test_a_module_in_two_places() -> None:
    class Shared(Mean):
        def __init__(self) -> None:
            super().__init__()
            self.again = self.out

        @fxbatch.autobatch
        def forward(self, words: torch.Tensor) -> torch.Tensor:
            h = self.embed(words)
            return self.again(h).sum(0) * self.out(h).mean(0)

    torch.manual_seed(0)
    model = Shared().double()
    compare(model, words(3, 5, 2))
    assert len(variants_of(model)) == 1


def test_products_after_sums_of_no_rows() -> None:
    class Linear(Mean):
        @fxbatch.autobatch
        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.out(self.embed(words)).mean(0).nan_to_num()

    torch.manual_seed(0)
    model = Linear().double()
    compare(model, words(3, 5, 2))
    compare(model, words(3, 0, 2))
    assert len(variants_of(model)) == 1


def test_sizes_in_python_as_in_c(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[torch.Tensor]] = [
        [torch.zeros(2, 3), torch.zeros(5, 3)], [torch.zeros(2), torch.zeros(2, dtype=torch.int64)],
        [torch.zeros(2), torch.zeros(2, requires_grad=True)], [torch.zeros(2), torch.zeros(2, 1)],
        [torch.zeros(2), nn.Parameter(torch.zeros(2))], [torch.zeros(())],
    ]  # fmt: skip
    for column in given:
        here = sizes_of(column)
        with monkeypatch.context() as twin:
            twin.setattr(state, "_fast", None)
            there = sizes_of(column)
        assert (here is None) == (there is None)
        if here is not None and there is not None:
            assert here[0].tolist() == there[0].tolist() == [list(t.shape) for t in column]
            assert here[1] == there[1]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_symbols_are_of_the_sizes_strides_and_flags_of_the_example(grad: bool, transposed: bool) -> None:
    x = torch.randn(5, 3).t() if transposed else torch.randn(3, 5)
    seen: list[torch.Tensor] = []

    def body(x: torch.Tensor) -> list[torch.Tensor]:
        seen.append(x)
        return [x + 1]

    symbolic.SizedGraph(body, [x.requires_grad_(grad)], ((0,),))
    (fake,) = seen
    assert fake.requires_grad is grad and fake.dtype is x.dtype and fake.device == x.device
    assert type(fake.shape[0]) is torch.SymInt and fake.shape[1] == 5
    assert [s if type(s) is int else s.node.hint for s in fake.stride()] == list(x.stride())


def test_a_loop_over_the_size_is_recorded() -> None:
    class Loop(Mean):
        @fxbatch.autobatch
        def forward(self, words: torch.Tensor) -> torch.Tensor:
            h = torch.zeros(8, dtype=torch.float64)
            for x in self.embed(words):
                h = torch.tanh(h + x)
            return h

    torch.manual_seed(0)
    model = Loop().double()
    compare(model, words(3, 5, 1))
    assert not variants_of(model)


def test_instances_that_are_never_alike_are_not_looked_through_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Lists of another length each (steps of a game, with their rewards), beside a tensor."""
    looks, look = [], packed_forward._of_containers
    monkeypatch.setattr(
        packed_forward, "_of_containers", lambda *args, **kw: looks.append(1) or look(*args, **kw)
    )

    class Game(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        @fxbatch.autobatch(adaptive=False)
        def forward(self, frames: torch.Tensor, rewards: list[float]) -> torch.Tensor:
            return torch.stack([self.layer(x) * r for x, r in zip(frames, rewards, strict=True)]).sum()

    game = Game()
    for _ in range(12):
        frames, rewards = [torch.randn(n, 4) for n in (2, 3, 5)], [[0.5] * n for n in (2, 3, 5)]
        results = game(frames, rewards)
        with fxbatch.disabled():
            torch.testing.assert_close(results, game(frames, rewards))
    assert len(looks) == packed_forward.MOST_UNLIKE + 1


def test_a_forward_with_effects_is_not_packed() -> None:
    class Counts(Mean):
        seen = 0

        @fxbatch.autobatch
        def forward(self, words: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            return self.embed(words).sum(0)

    model = Counts()
    model(words(3, 5))
    assert model.seen == 2
    assert not variants_of(model)
    assert route_of(model).forward is None  # nothing is imported for what can't be packed


def test_sizes_are_asked_no_more_once_they_differed(monkeypatch: pytest.MonkeyPatch) -> None:
    """All arguments of all instances are looked through for it."""

    class Prints(Mean):
        @fxbatch.autobatch(adaptive=False)
        def forward(self, words: torch.Tensor) -> torch.Tensor:
            print(end="")
            return self.embed(words).sum(0)

    asked: list[bool] = []
    ask = packed_route._sizes_differ
    monkeypatch.setattr(packed_route, "_sizes_differ", lambda x: asked.append(ask(x)) or asked[-1])
    model = Prints()
    for sizes in ((3, 3), (3, 5), (4, 2), (3, 3)):
        model(words(*sizes))
    assert asked == [False, True]
    assert route_of(model).forward is None


def test_dropout_is_drawn_anew() -> None:
    class Drop(Mean):
        @fxbatch.autobatch
        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(self.embed(words), 0.5, self.training).sum(0)

    model, batch = Drop(), words(3, 5)
    assert not torch.equal(model(batch), model(batch))
    assert len(variants_of(model)) == 1
    model.eval()
    assert torch.equal(model(batch), model(batch))


def test_only_the_side_of_the_mode_that_runs_is_looked_at() -> None:
    class Decodes(Mean):
        @fxbatch.autobatch
        def forward(self, words: torch.Tensor) -> Any:
            scores = self.out(self.embed(words).mean(0))
            if self.training:
                return nn.functional.cross_entropy(scores, words[0] % 3)
            return int(scores.numpy().argmax())

    model = Decodes()
    for number in range(4):
        batch = words(3, 5 + number, 2)
        check_equal(model.train(), batch)
        assert not route_of(model).code.reason
        with torch.no_grad():
            check_equal(model.eval(), batch, gradients=False)
        assert "numpy" in route_of(model).code.reason
    assert len(variants_of(model)) == 1


def test_two_arguments_of_own_sizes() -> None:
    class Pair(Mean):
        @fxbatch.autobatch
        def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            x, y = self.embed(a), self.embed(b)
            return ((x @ y.t()).softmax(-1) @ y).sum(0)

    torch.manual_seed(0)
    model, first, second = Pair().double(), words(3, 5, 2), words(4, 1, 6)
    found = model(first, second)
    with fxbatch.disabled():
        torch.testing.assert_close(found, model(first, second))
    assert len(variants_of(model)) == 1


def test_an_argument_that_some_instances_lack() -> None:
    class Masked(nn.Module):
        @fxbatch.autobatch(adaptive=False)
        def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
            return (x if mask is None else x * mask).sum(0)

    model, x, mask = Masked(), list(torch.randn(3, 5)), list(torch.rand(3, 5))
    model(x, mask)  # as columns of tensors
    found = model(x, [mask[0], None, mask[2]])
    torch.testing.assert_close(
        found, torch.stack([(x[0] * mask[0]).sum(), x[1].sum(), (x[2] * mask[2]).sum()])
    )


def test_explain_shows_sizes_rows_and_padding() -> None:
    text = str(fxbatch.explain(Tagger(), words(3, 5, 2, 10)))
    assert "Tagger.forward(i64[*]) -> (f32[*,3])" in text
    assert "20 rows, 2 to 10 per instance, 50% padding where rows are padded" in text


def test_explain_tells_what_runs_instance_by_instance() -> None:
    class Medians(Mean):
        @fxbatch.autobatch
        def forward(self, words: torch.Tensor) -> torch.Tensor:
            x = self.embed(words)
            return x.median(0)[0]

    found = fxbatch.explain(Medians(), words(3, 5, 2))
    assert [(row.signature, row.calls) for row in found.unbatched] == [("aten.median.dim", 3)]


@pytest.mark.parametrize("container", ["jagged", "packed sequence"])
def test_minibatches_of_own_sizes(container: str) -> None:
    model, batch = Tagger(), words(3, 5, 2)
    if container == "jagged":
        given: Any = torch.nested.nested_tensor(batch, layout=torch.jagged)
    else:
        given = nn.utils.rnn.pack_sequence(batch, enforce_sorted=False)
    torch.testing.assert_close(model(given), model(batch))


def test_nested_results() -> None:
    class Nested(Mean):
        @fxbatch.autobatch(out="nested")
        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.embed(words)

    model, batch = Nested(), words(3, 5, 2)
    found = model(batch)
    assert found.layout == torch.jagged
    torch.testing.assert_close(list(found.unbind()), [model.embed(w) for w in batch])
    found.values().sum().backward()
    assert model.embed.weight.grad is not None
    assert model.embed.weight.grad.sum() == 10 * 8


def test_instances_as_dictionaries() -> None:
    class Graph(Mean):
        @fxbatch.autobatch
        def forward(self, g: dict[str, torch.Tensor]) -> torch.Tensor:
            h = self.embed(g["x"])
            return h.index_add(0, g["edges"][1], h[g["edges"][0]]).sum(0)

    torch.manual_seed(0)
    model = Graph().double()
    batch = [{"x": torch.randint(50, (n,)), "edges": torch.randint(n, (2, 2 * n))} for n in (3, 5, 4)]
    found = model(batch)
    with fxbatch.disabled():
        torch.testing.assert_close(found, model(batch))
    assert len(variants_of(model)) == 1


def test_whether_an_argument_requires_gradients_is_part_of_the_kind() -> None:
    class Asks(nn.Module):
        @fxbatch.autobatch
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum(0) * (2 if x.requires_grad else 1)

    model, batch = Asks(), [torch.ones(n, 3) for n in (3, 5)]
    asking = [x.clone().requires_grad_() for x in batch]
    for given, factor in ((batch, 1), (asking, 2), (batch, 1)):
        torch.testing.assert_close(model(given), torch.stack([x.sum(0) * factor for x in batch]))


class Graph(NamedTuple):
    x: torch.Tensor
    edges: torch.Tensor

    @property
    def counts(self) -> torch.Tensor:
        ones = self.x.new_ones(self.edges.shape[1])
        return self.x.new_zeros(len(self.x)).index_add(0, self.edges[1], ones) * GRAPH_SCALE


GRAPH_SCALE = 1.0


class OfGraphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(4, 3)

    @fxbatch.autobatch(adaptive=False)
    def forward(self, g: Graph) -> torch.Tensor:
        h = self.l(g.x)
        return (torch.zeros_like(h).index_add(0, g.edges[1], h[g.edges[0]]) * g.counts[:, None]).sum(0)


def graphs(*sizes: int) -> list[Graph]:
    return [Graph(torch.randn(n, 4), torch.randint(n, (2, n + 1))) for n in sizes]


def test_named_tuples_are_packed_and_what_their_classes_hold_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = OfGraphs()
    compare(model, graphs(3, 5, 1))
    assert [v.calls for v in variants_of(model)] == [1]
    monkeypatch.setattr(Graph, "counts", property(lambda g: g.x.sum(1)))
    compare(model, graphs(3, 5, 4))
    monkeypatch.setattr(Graph, "scale", 2.0, raising=False)
    monkeypatch.setattr(Graph, "counts", property(lambda g: g.x.sum(1) * g.scale))
    compare(model, graphs(3, 5, 4))
    monkeypatch.setattr(Graph, "scale", 5.0, raising=False)
    compare(model, graphs(3, 5, 4))


def test_counts_beyond_their_length_are_those_of_the_loop() -> None:
    """`bincount` is longer then: the packed form can't be, and the forward is recorded."""

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(1, 3)

        @fxbatch.autobatch(adaptive=False, out="list")
        def forward(self, index: torch.Tensor) -> torch.Tensor:
            return self.out(torch.bincount(index, minlength=len(index))[:, None].double())

    model = Counts().double()
    compare(model, [torch.randint(n, (n,)) for n in (3, 5, 2)])
    assert variants_of(model)[0].calls == 1
    compare(model, [torch.arange(n) + 1 for n in (3, 5, 2)])
