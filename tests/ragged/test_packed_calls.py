"""Submodules on tensors of their own sizes in a forward that takes objects: one step a level, rows where they lie."""

from __future__ import annotations

import itertools
import logging
import random
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import Variable

import fxbatch
import fxbatch.ragged.lengths
import fxbatch.ragged.symbolic
from fxbatch import mistakes
from fxbatch.errors import InternalWarning
from fxbatch.ragged import check
from fxbatch.runtime import operation_cache, packed_calls
from fxbatch.runtime.build_queue import BuildQueue
from fxbatch.runtime.packed_calls import CallFamily
from fxbatch.runtime.strategy import AdaptiveSwitch, Choice, Strategy
from fxbatch.trace import table
from fxbatch.trace.constants import RowColumn
from tests.oracle import check_equal


class Sentence:
    def __init__(self, n: int) -> None:
        self.words = torch.randint(50, (n,))
        self.heads = [(i + 1) // 2 - 1 for i in range(n)]  # a heap: child i hangs on (i + 1) // 2 - 1


class Parser(nn.Module):
    """A Transformer encodes the sentence; a recursive cell goes over its tree."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.cell = nn.Linear(16, 8)
        self.out = nn.Linear(8, 3)

    def compose(self, x: torch.Tensor, s: Sentence, i: int) -> torch.Tensor:
        h = x[i]
        for child in range(2 * i + 1, min(2 * i + 3, len(s.words))):
            h = torch.tanh(self.cell(torch.cat([h, self.compose(x, s, child)])))
        return h

    @fxbatch.autobatch
    def forward(self, s: Sentence) -> torch.Tensor:
        return self.out(self.compose(self.encoder(self.embed(s.words)), s, 0))


class Greedy(Parser):
    """Waits for values between its calls: rows are read in later phases."""

    @fxbatch.autobatch
    def forward(self, s: Sentence) -> torch.Tensor:
        x = self.encoder(self.embed(s.words))
        h = x[0]
        for i in range(1, min(len(s.words), 4)):
            if (self.out(h)[0] > 0).item():
                h = torch.tanh(self.cell(torch.cat([h, x[i]])))
            else:
                h = h + x[-1]
        return self.out(h)


# Of the first minibatch each size has graphs of its own; these are the same in all tests here.
FIRST = (3, 5, 2)


def engine_of(model: nn.Module) -> Any:
    return next(iter(model.__dict__["_fxbatch_engines"].values()))


def families(model: nn.Module) -> list[CallFamily]:
    return [f for f in engine_of(model).packed_calls.families if f.function is not None]


def results(model: nn.Module, batch: Any) -> tuple[torch.Tensor, list[Any]]:
    model.zero_grad()
    found = model(batch)
    found.square().sum().backward()
    return found.detach(), [p.grad for p in model.parameters()]


@pytest.mark.parametrize("cls", [Parser, Greedy])
def test_encoder_whose_rows_feed_a_tree(cls: Any) -> None:
    model = cls().double()
    for sizes in (FIRST, (4, 1, 9, 6, 3), (30, 2, 1, 8)):
        batch = [Sentence(n) for n in sizes]
        found = results(model, batch)
        with fxbatch.disabled():
            torch.testing.assert_close(found, results(model, batch))
    assert {f.signature.name for f in families(model) if f.signature} == {"embed", "encoder"}
    last = [f for f in families(model) if f.calls]
    assert all(f.steps <= 3 for f in last)


class SizesAmongArguments(Parser):
    """Sizes among the arguments: of views, of an expansion."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(8, 4, bidirectional=True)

    @fxbatch.autobatch(out="list", adaptive=False)
    def forward(self, s: Sentence) -> torch.Tensor:
        assert s.heads
        n = len(s.words)
        h, _ = self.rnn(self.embed(s.words).view(n, 1, 8))
        pairs = h.reshape(n, 2, 4).transpose(0, 1).reshape(2 * n, 4)
        both = pairs.view(2, n, 4).sum(0).repeat(1, 2) + h.view(n, -1)
        return self.out(torch.tanh(both) * h.sum(2).expand(n, 8))


@pytest.mark.parametrize("light", [4, 1])
def test_many_sizes_of_one_function_make_no_other_table(light: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Functions are built once though more sizes are met than a table has signatures; with as few of these as of
    others, again and again."""

    class Encoder(Parser):
        @fxbatch.autobatch(out="list")
        def forward(self, s: Sentence) -> torch.Tensor:
            assert s.heads  # an argument with other content in each instance: the forward is recorded
            return self.encoder(self.embed(s.words))

    monkeypatch.setattr(table, "LIGHT", light)
    model = Encoder().eval()
    model([Sentence(n) for n in (*FIRST, 7)])
    engine, built = engine_of(model), families(model)
    engine.table.limit = len(engine.table) + 40
    for start in range(8, 32, 4):
        batch = [Sentence(n) for n in range(start, start + 4)]
        with fxbatch.disabled():
            expected = model(batch)
        torch.testing.assert_close(model(batch), expected)
    assert len(built) == 2 and (families(model) == built) == (light > 1)


def test_numbers_that_are_sizes_make_no_families_of_their_own() -> None:
    model = SizesAmongArguments().double()
    for sizes in (FIRST, (4, 1, 9, 6, 3), (30, 2, 8, 8), (7, 5, 11, 12, 4)):
        batch = [Sentence(n) for n in sizes]
        check_equal(model, batch)
    met = [(f.signature.name, f.calls) for f in families(model) if f.signature]
    names = [name for name, _ in met]
    assert [names.count(name) for name in ("view", "reshape", "expand")] == [2, 2, 1]
    assert all(2 * calls > dict(met)["embed"] for _, calls in met)


class Word:
    def __init__(self, words: int, longest: int) -> None:
        self.letters = torch.randint(50, (words, longest))


class Letters(Parser):
    @fxbatch.autobatch(out="list", adaptive=False)
    def forward(self, s: Word) -> torch.Tensor:
        words = self.embed(s.letters).sum(1)
        h = words[0]
        for word in words[1:]:
            h = torch.tanh(h + word)
        return h


def test_a_family_in_which_another_dimension_differs_later_becomes_wider() -> None:
    model = Letters().double()
    for sizes in (
        [(2, 5), (3, 5), (4, 5), (6, 5)],
        [(7, 4), (6, 4), (3, 6)],
        [(2, 5), (9, 8), (5, 11), (3, 2)],
    ):
        check_equal(model, [Word(*s) for s in sizes])
    embed = [f for f in families(model) if f.signature and f.signature.name == "embed"]
    assert [f.function.dynamic for f in embed if f.function] == [((0,),), ((0, 1),)]
    steps = embed[1].steps
    check_equal(model, [Word(*s) for s in [(2, 5), (6, 5), (7, 4), (8, 3)]])  # sizes of both, and new ones
    assert embed[1].steps > steps and embed[1].calls >= 4 * (embed[1].steps - steps)


class Story:
    def __init__(self, sentences: int) -> None:
        self.sentences = [torch.randint(50, (i % 5 + 1,)) for i in range(sentences)]


class Memory(Parser):
    """Sentences of their own lengths, encoded one by one, are rows of a memory that is read twice."""

    fixed = False  # whether no gradients go through the stack

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(8, 8)

    @fxbatch.autobatch(out="list", adaptive=False)
    def forward(self, s: Story) -> torch.Tensor:
        rows = [self.embed(words).sum(0) for words in s.sentences]
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.fixed):
            memory = torch.stack(rows)
        memory = self.mix(memory)
        h = self.embed.weight[0]
        for _ in range(2):
            h = h + (torch.softmax(memory @ h, 0)[:, None] * memory).sum(0)
        return self.out(h)


@pytest.mark.parametrize("fixed", [False, True])
def test_stacks_of_what_packed_calls_give_are_taken_from_it_at_once(
    monkeypatch: pytest.MonkeyPatch, fixed: bool
) -> None:
    model, asked = Memory().double(), []
    model.fixed = fixed
    inputs_of = packed_calls._Resolution.inputs_of
    monkeypatch.setattr(
        packed_calls._Resolution, "inputs_of", lambda work, c: (asked.append(c), inputs_of(work, c))[1]
    )
    for sizes in ((3, 9, 12), (8, 1, 10, 11), (13, 9, 2, 16), (4, 12, 17, 14)):
        asked.clear()
        check_equal(model, [Story(n) for n in sizes])
    assert any(f.stacks and f.calls for f in engine_of(model).packed_calls.families)
    assert not asked


class Labelled(nn.Module):
    """A loss over the predictions at all nodes of a tree, each a tensor of one row; of one element, as scores are."""

    def __init__(self, *, elements: bool) -> None:
        super().__init__()
        self.embed, self.join, self.out = (
            nn.Embedding(50, 8),
            nn.Linear(16, 8),
            nn.Linear(8, 1 if elements else 5),
        )
        self.elements = elements

    def node(self, words: torch.Tensor, rows: list[torch.Tensor]) -> torch.Tensor:
        if len(words) == 1:
            h = self.embed(words)
        else:
            middle = len(words) // 2
            h = torch.tanh(
                self.join(torch.cat([self.node(words[:middle], rows), self.node(words[middle:], rows)], 1))
            )
        rows.append(self.out(h).squeeze(0) if self.elements else self.out(h))
        return h

    @fxbatch.autobatch(out="list", adaptive=False)
    def forward(self, words: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows: list[torch.Tensor] = []
        self.node(words, rows)
        together = torch.cat(rows)
        if self.elements:
            return torch.softmax(together, 0)[-1], together.max()
        labels = torch.arange(len(rows)) % 5
        return nn.functional.cross_entropy(together, labels), together.max(1)[0].sum(), together[-1]


@pytest.mark.parametrize("elements", [False, True])
def test_rows_that_are_joined_are_a_tensor_of_their_own_size(elements: bool) -> None:
    """`torch.cat` of tensors of one row each, another number of them for each tree."""
    model = Labelled(elements=elements)
    for number in range(4):
        check_equal(model, [torch.randint(50, (n + number,)) for n in (3, 9, 12, 7, 5, 16)])
    joined = [f for f in engine_of(model).packed_calls.families if f.stacks]
    assert sum(f.calls for f in joined)
    with torch.no_grad():
        check_equal(model, [torch.randint(50, (n,)) for n in (4, 11, 6)], gradients=False)
    before = sum(f.steps for f in joined)
    model([torch.randint(50, (n,)) for n in (19, 23, 21, 17)])  # sizes that were never met
    assert sum(f.steps for f in joined) == before + 1


class WithoutGradients(Parser):
    """What is read of a packed value under `no_grad` meets calls with gradients."""

    read = "row"

    @fxbatch.autobatch(out="list", adaptive=False)
    def forward(self, s: Sentence) -> torch.Tensor:
        x = self.encoder(self.embed(s.words))
        with torch.no_grad():
            ways = {
                "row": lambda: x[0],
                "rows": lambda: next(iter(x)),
                "unbind": lambda: x.unbind(0)[-1],
                "sum": lambda: x.sum(0),
            }
            h = ways[self.read]()
        return self.out(self.compose(x, s, 0) + torch.tanh(h))


@pytest.mark.parametrize("read", ["row", "rows", "unbind", "sum"])
def test_rows_that_are_read_without_gradients_have_none(read: str) -> None:
    model = WithoutGradients().double()
    model.read = read
    for sizes in (FIRST, (4, 1, 9, 6, 3), (30, 2, 8, 8)):
        check_equal(model, [Sentence(n) for n in sizes])


class TwoEncoders(Parser):
    """Rows of what two encoders give, and tensors of the instance of their type; some rows are read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.LogSigmoid())
        self.start = nn.Parameter(torch.randn(8))

    @fxbatch.autobatch(adaptive=False)
    def forward(self, s: Sentence) -> torch.Tensor:
        words = self.embed(s.words)
        x, y = self.encoder(words), self.other.forward(self.encoder(words))
        h = self.start
        for i in range(len(s.words)):
            h = torch.tanh(self.cell(torch.cat([h, x[i] if i % 2 else y[i]])))
        for t in (*s.brought, y[0], x[-1]):  # type: ignore[attr-defined]
            h = h + torch.tanh(self.cell(torch.cat([t, h])))
        return self.out(h)


def test_rows_of_several_encoders_are_read_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TwoEncoders().double()
    columns: list[Any] = []
    plain = packed_calls._rows_at_hand
    monkeypatch.setattr(packed_calls, "_rows_at_hand", lambda x: columns.append(plain(x)) or columns[-1])
    for sizes in (FIRST, (4, 1, 9, 6, 3), (30, 2, 8, 8)):
        batch = [Sentence(n) for n in sizes]
        for n, s in zip(sizes, batch, strict=True):
            s.brought = [torch.randn(8, dtype=torch.float64), model.start.detach() * n]  # type: ignore[attr-defined]
            if n == 3:
                s.brought[0].requires_grad_()  # type: ignore[attr-defined]
        columns.clear()
        check_equal(model, batch)
        brought = batch[0].brought[0]  # type: ignore[attr-defined]
        brought.grad = None
        model(batch).square().sum().backward()
        if brought.requires_grad:
            own, brought.grad = brought.grad, None
            with fxbatch.disabled():
                model(batch).square().sum().backward()
            torch.testing.assert_close(own, brought.grad)
    rows = [x for x in columns if isinstance(x, RowColumn) and (x.row >= 0).any()]
    assert rows and max(len(x.sources) for x in rows) > 1


class OldVariables(Parser):
    @fxbatch.autobatch(adaptive=False)
    def forward(self, s: Sentence) -> torch.Tensor:
        assert s.heads
        h = Variable(self.embed(s.words))
        return self.out(torch.tanh(h)).sum(0)


def test_old_variables_of_values_of_own_sizes() -> None:
    """What a value's `__torch_dispatch__` calls can't be traced with symbols: a fourth size had another's shape."""
    model = OldVariables().double()
    for sizes in (FIRST, (4, 1, 9, 6, 3), (30, 2, 8, 7)):
        check_equal(model, [Sentence(n) for n in sizes])


def test_new_sizes_run_no_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    import fxbatch.trace.modules as modules

    class Encoder(Parser):
        @fxbatch.autobatch(out="list")
        def forward(self, s: Sentence) -> torch.Tensor:
            assert s.heads  # an argument with other content in each instance: the forward is recorded
            return self.encoder(self.embed(s.words))

    model = Encoder().double()
    model([Sentence(n) for n in FIRST])
    ran: list[Any] = []
    real = modules.run_on_fakes
    monkeypatch.setattr(modules, "run_on_fakes", lambda *a, **k: ran.append(a) or real(*a, **k))
    model([Sentence(n) for n in range(10, 30)])
    assert not ran
    assert len(families(model)) == 2


def test_no_grad_calls_stay_without() -> None:
    class Frozen(Parser):
        @fxbatch.autobatch
        def forward(self, s: Sentence) -> torch.Tensor:
            assert s.heads
            with torch.no_grad():
                x = self.encoder(self.embed(s.words))
            return self.out(x[0])

    model = Frozen().double()
    batch = [Sentence(n) for n in (*FIRST, 4)]
    results(model, batch)
    found = results(model, batch)
    with fxbatch.disabled():
        torch.testing.assert_close(found, results(model, batch))
    assert model.embed.weight.grad is None
    assert any(f.calls for f in families(model))


def test_first_members_are_packed_where_the_family_is_built() -> None:
    """Calls that were recorded before there was a family are not built by themselves."""
    model = Parser().double()
    batch = [Sentence(n) for n in (*FIRST, 7)]
    for times in (1, 2):
        model(batch)
        assert [f.calls for f in families(model)] == [4 * times, 4 * times]


class Rows(Parser):
    """Goes over the rows, twice: once all of them, once from the end."""

    @fxbatch.autobatch
    def forward(self, s: Sentence) -> torch.Tensor:
        h = torch.zeros(8, dtype=self.out.weight.dtype)
        x = self.encoder(self.embed(s.words))
        for row in [*x, *x.unbind()[::-1]]:
            h = torch.tanh(self.cell(torch.cat([h, row])))
        return self.out(h)


def test_going_over_rows_is_no_call() -> None:
    """`for row in x`: an operation a length would be built for it, and would copy."""
    torch.manual_seed(0)
    model = Rows().double()
    for sizes in ((3, 5, 2, 7), (1, 6, 4)):
        batch = [Sentence(n) for n in sizes]
        found = results(model, batch)
        with fxbatch.disabled():
            torch.testing.assert_close(found, results(model, batch))
        shown = {row.operation for row in fxbatch.explain(model, batch).operations}
        assert not shown & {"unbind", "encoder", "getitem"}


class Free(Parser):
    """torch's own functions on what the encoder gives."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(8))

    @fxbatch.autobatch
    def forward(self, s: Sentence) -> torch.Tensor:
        assert s.heads
        x = torch.tanh(self.encoder(self.embed(s.words)))
        weights = torch.softmax(x @ self.query, 0)
        pooled = (weights.unsqueeze(1) * x).sum(0) + x.mean(0) + x.amax(0) + torch.cat([x, x * 2]).sum(0)
        return self.out(x[0] * pooled + x[s.words % len(s.words)].sum(0))


def test_functions_beside_packed_modules_are_packed() -> None:
    torch.manual_seed(0)
    model = Free().double()
    for sizes in ((3, 5, 2, 7), (4, 1, 9, 6, 3), (11, 12, 1)):
        batch = [Sentence(n) for n in sizes]
        found = results(model, batch)
        with fxbatch.disabled():
            torch.testing.assert_close(found, results(model, batch))
    ran = {f.signature.name: f.calls for f in families(model) if f.signature}
    assert all(ran[name] for name in ("tanh", "matmul", "softmax", "mean", "amax", "getitem")), list(
        ran.items()
    )


class Counting(nn.Module):
    """A layer whose code asks for `len`, and for the larger of two sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).view(max(1, len(x)), 2, 4).transpose(1, 2).reshape(len(x), 8)


class Pushing(nn.Module):
    """A stack that grows by a row, as that of Grefenstette et al. 2015: writes at a place that is a size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[0] + 1
        y = torch.zeros(n, 8, dtype=x.dtype)
        y[: n - 1] = self.linear(x)
        y[n - 1] = x[n - 2] * 2
        y[n - 2, 2:6] = x[0, 1:5]
        y[-1, 0] = 3.0
        y[1:, 7] += 1
        return y[n - 1, 2:] * torch.triu(torch.ones(n, n, dtype=x.dtype)).sum() + y[:, 1:7].sum(0)


class OfLayers(nn.Module):
    """An encoder of one of these layers."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(50, 8), layer

    @fxbatch.autobatch(adaptive=False)
    def forward(self, s: Sentence) -> torch.Tensor:
        assert s.heads
        return self.layer(self.embed(s.words)).sum(0)


@pytest.mark.parametrize("layer", [Counting, Pushing])
def test_layers_whose_code_counts_rows_are_packed(layer: type[nn.Module]) -> None:
    model = OfLayers(layer()).double()
    for sizes in ((3, 5, 2, 7), (4, 1, 9, 6, 3), (11, 12, 1)):
        batch = [Sentence(n) for n in sizes]
        found = results(model, batch)
        with fxbatch.disabled():
            torch.testing.assert_close(found, results(model, batch))
    assert {f.signature.name: f.calls for f in families(model) if f.signature}["layer"] == 12
    assert layer.__module__ in sys.modules and "len" not in vars(sys.modules[layer.__module__])


class Attention(nn.Module):
    """Attends to states, with what it attended to before, but for the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.score = nn.Linear(8, 1)

    def forward(
        self, states: torch.Tensor, query: torch.Tensor, before: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        score = self.score(torch.tanh(states + query)).squeeze(1)
        weights = torch.softmax(score if before is None else score + before, 0)
        return weights @ states, weights


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attend, self.cell = nn.Embedding(50, 8), Attention(), nn.GRUCell(8, 8)

    @fxbatch.autobatch(adaptive=False)
    def forward(self, s: Sentence) -> torch.Tensor:
        assert s.heads
        states, weights = self.embed(s.words), None
        h = states[:1]
        for _ in range(3):
            seen, weights = self.attend(states, h, weights)
            h = self.cell(seen[None], h)
            if (h[0, 0] > 10.0).item():  # all wait here: each begins before any goes on
                break
        return h[0]


def test_one_module_that_is_packed_in_two_ways_is_one_operation_in_both() -> None:
    """What is packed counts among no signatures, of which more than a few say that its parts batch better."""
    model = Decoder().double()
    for sizes in (range(2, 16), range(5, 20)):
        batch = [Sentence(n) for n in sizes]
        found = results(model, batch)
        with fxbatch.disabled():
            torch.testing.assert_close(found, results(model, batch))
    assert [f.signature.name for f in families(model) if f.signature].count("attend") == 2
    assert "by its parts" not in str(fxbatch.explain(model, batch))


def test_explain_tells_of_packed_calls() -> None:
    model = Parser().double()
    batch = [Sentence(n) for n in (*FIRST, 7)]
    for _ in range(2):
        model(batch)
    text = str(fxbatch.explain(model, batch))
    assert "packed: encoder(f64[*,8]) -> (f64[*,8])" in text


class Asking(nn.Module):
    """A layer whose code asks whether gradients go through its input: no graph is for both answers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (3.0 if x.requires_grad else 1.0)


class Asked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.asking = Asking()

    @fxbatch.autobatch(adaptive=False)
    def forward(self, s: Sentence) -> torch.Tensor:
        return self.asking(self.embed(s.words))[0]


def test_code_that_asks_about_gradients_is_not_packed() -> None:
    """Whether what notices it was imported before, or by the first call that may be packed, while recording."""
    assert "fxbatch.ragged.symbolic" in sys.modules
    model = Asked()
    for _ in range(3):
        batch = [Sentence(n) for n in (*FIRST, 4)]
        with fxbatch.disabled():
            expected = model(batch)
        torch.testing.assert_close(model(batch), expected)
    assert "Asking" not in str([f.signature.name for f in families(model)])


def test_a_wrong_rule_is_found_before_a_packed_call_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mistakes, "_warned", set())
    plain = fxbatch.ragged.lengths.Lengths.unpad
    monkeypatch.setattr(fxbatch.ragged.lengths.Lengths, "unpad", lambda self, x: plain(self, x) * 2)
    model = Parser()
    with pytest.warns(InternalWarning, match="differs from the loop"):
        for sizes in (FIRST, (7, 4, 6)):
            check_equal(model, [Sentence(n) for n in sizes])
    assert [f.reason.partition(":")[0] for f in families(model)].count("AssertionError") == 1


class Views(Parser):
    """Views between packed calls, and writes through some."""

    @fxbatch.autobatch
    def forward(self, s: Sentence) -> torch.Tensor:
        h = self.encoder(self.embed(s.words))
        weight = torch.softmax(h @ self.out.weight[0], 0)
        g = (h + weight.unsqueeze(1) * h).t().transpose(0, 1)
        k = h.clone()
        k.unsqueeze(1).mul_(2)
        k[0] = 0
        return self.out(self.compose(g + k.flip(0), s, 0))


def test_views_of_packed_values_are_packed() -> None:
    model = Views()
    for sizes in ((3, 5, 2, 7), (4, 1, 9, 6, 3), (11, 12, 1), (5, 5, 2)):
        check_equal(model, [Sentence(n) for n in sizes])
    ran = {f.signature.name: f.calls for f in families(model) if f.signature}
    assert all(ran[name] for name in ("unsqueeze", "mul", "t", "transpose")), ran


class Numbers(Parser):
    """Numbers that meet what the encoder gives, also after a question, and masks of it."""

    @fxbatch.autobatch(adaptive=False)
    def forward(self, s: Sentence) -> torch.Tensor:
        assert s.heads
        x = 1 - self.encoder(self.embed(s.words)) * 2
        mask = (x > 0.1) * 3
        if x.sum().item() > 0:
            x = x / len(s.words)
        return self.out((x * mask / 0.5).sum(0))


def test_numbers_that_meet_packed_values_are_packed() -> None:
    torch.manual_seed(0)
    model = Numbers().double()
    for sizes in ((3, 5, 2, 7), (4, 1, 9, 6, 3), (11, 12, 1)):
        batch = [Sentence(n) for n in sizes]
        found = results(model, batch)
        with fxbatch.disabled():
            torch.testing.assert_close(found, results(model, batch))
    ran = {str(f.signature).split("(")[0]: f for f in families(model) if f.signature}
    last = [name for name, f in ran.items() if f.calls >= 3]
    assert {"rsub", "gt", "mul", "truediv"} <= set(last), [(n, f.calls, f.reason) for n, f in ran.items()]


class Unread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    @fxbatch.autobatch(adaptive=False)
    def forward(self, s: Any) -> torch.Tensor:
        h = torch.zeros(8)
        for row in s:
            h = torch.tanh(self.used(h)) + row
        assert len(torch.stack([torch.tanh(self.other(row)) + h for row in s])) == len(s)
        return h


def test_a_stack_that_nobody_reads_is_no_segment() -> None:
    model = Unread()
    for sizes in ((9, 11, 10), (12, 9, 14), (9, 13)):
        model.zero_grad()
        model([list(torch.randn(n, 8)) for n in sizes]).sum().backward()
        assert {n for n, p in model.named_parameters() if p.grad is not None} == {"used.weight", "used.bias"}


class AttentiveDecoder(nn.Module):
    """Attends to the states of its sentence at each step, with the weights of the step before, and waits after it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 8)
        self.encoder = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.cell = nn.GRUCell(8, 8)
        self.out = nn.Linear(8, 5)

    @fxbatch.autobatch(adaptive=False, out="list")
    def forward(self, s: Sentence) -> torch.Tensor:
        states = self.encoder(self.embed(s.words))
        h, weights = states.mean(0), torch.softmax(states.sum(1), 0)
        for _ in range(6):
            h = self.cell((weights.unsqueeze(1) * states).sum(0)[None], h[None])[0]
            weights = torch.softmax(torch.tanh(states + h).sum(1) + weights, 0)
            if int(self.out(h).argmax()) == 0:
                break
        return torch.cat([self.out(h), weights])


def test_packed_calls_run_between_others_of_a_phase() -> None:
    """What reads a state of this phase, and the weights of the one before, is a step a family, not one a length."""
    torch.manual_seed(3)
    model = AttentiveDecoder()
    batch = [Sentence(n) for n in range(9, 39)]
    with torch.no_grad():
        for _ in range(3):  # in the first functions are built
            model(batch)
        calls, steps = (sum(getattr(f, name) for f in families(model)) for name in ("calls", "steps"))
        outputs = model(batch)
        calls = sum(f.calls for f in families(model)) - calls
        steps = sum(f.steps for f in families(model)) - steps
        with fxbatch.disabled():
            for ours, theirs in zip(outputs, model(batch), strict=True):
                torch.testing.assert_close(ours, theirs)
    assert calls >= 20 * steps, (calls, steps)
    assert calls > 1500, calls  # 30 sentences, up to six phases of ten calls with sizes
    with torch.no_grad():
        assert {"out", "cell"} <= {row.operation for row in fxbatch.explain(model, batch).operations}
    check_equal(model, batch)  # with gradients, where they run as any other


class Residual(AttentiveDecoder):
    """Adds rows of each sentence's own number once, maybe one, and one row at each step."""

    @fxbatch.autobatch(adaptive=False, out="list")
    def forward(self, s: Sentence) -> torch.Tensor:
        embedded = self.embed(s.words)
        states = self.encoder(embedded) + embedded
        h = states[:1]
        context = h
        for _ in range(8):
            h = self.cell(context, h)
            weights = torch.softmax((states * h).sum(1), 0).unsqueeze(1)
            context = (weights * states).sum(0, keepdim=True) + h
            if int(self.out(context).argmax()) == 0:
                break
        return self.out(h)


def test_calls_of_one_size_are_no_packed_ones_because_others_of_the_function_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A function that adds rows of all lengths, in a phase one row each: these belong to the steps around them."""
    monkeypatch.setattr(operation_cache, "MANY_NEW", 0)  # as in a model that has many signatures
    torch.manual_seed(0)
    model = Residual()
    batch = [Sentence(n) for n in (1, *range(9, 39))]
    added: list[int] = []
    with torch.no_grad():
        for _ in range(5):
            outputs = model(batch)
            added.append(sum(f.steps for f in families(model) if f.members[0].signature.name == "add"))
        phases = fxbatch.explain(model, batch).phases
        with fxbatch.disabled():
            for ours, theirs in zip(outputs, model(batch), strict=True):
                torch.testing.assert_close(ours, theirs)
    assert added[0] and added[-1] - added[-2] <= 3 < phases, (added, phases)  # in the phase of the first one
    check_equal(model, batch)


class Framed(nn.Module):
    """What the encoder gives with some rows of the instance's own on both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(8, 8)

    @fxbatch.autobatch(adaptive=False)
    def forward(self, left: torch.Tensor, words: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return torch.cat([left, self.encoder(words), right]).square().mean(0)


def test_sizes_that_make_no_example_run_by_themselves() -> None:
    """In each call one side has no rows: a function is built of calls in which it is the same one."""
    model = Framed()
    again = [(0, 3), (0, 5), (2, 0), (0, 7), (4, 0)]
    for more in ([], [], [], [], [(0, 6), (0, 8), (0, 9)], [], [(5, 0), (0, 2), (0, 4)], []):
        sides = again + more
        words = [torch.randn(sum(pair), 8) for pair in sides]
        left, right = [[torch.randn(pair[side], 8) for pair in sides] for side in (0, 1)]
        check_equal(model, left, words, right)
    (cat,) = [f for f in engine_of(model).packed_calls.families if f.signature.name == "cat"]
    assert cat.calls and not cat.reason


class Twice(Parser):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(8, 8)

    @fxbatch.autobatch(adaptive=False)
    def forward(self, s: Sentence) -> torch.Tensor:
        assert s.heads
        h = self.encoder(self.embed(s.words))
        return (torch.sin(h) + torch.sin(self.second(h))).mean(0)


def test_what_a_check_refuses_does_not_run_behind_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of one function run as soon as their inputs are at hand: the second ones after the check of the first."""
    from fxbatch.ragged import check

    plain = check.check_against_body

    def refused(function: Any, columns: Any, shared: Any) -> None:
        if not shared:
            raise ArithmeticError("no")
        plain(function, columns, shared)

    monkeypatch.setattr(check, "check_against_body", refused)
    model = Twice()
    for k in range(3):
        check_equal(model, [Sentence(n + k) for n in (3, 5, 2, 7)])
    (sin,) = [f for f in engine_of(model).packed_calls.families if f.signature.name == "sin"]
    assert "no" in sin.reason and not sin.calls


def test_functions_in_autocast_are_not_packed() -> None:
    model = Twice()
    check_equal(model, [Sentence(n) for n in (3, 5, 2, 7)])
    calls = sum(f.calls for f in families(model))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for k in range(3):
            batch = [Sentence(n + k) for n in (3, 5, 2, 7)]
            found = model(batch)
            with fxbatch.disabled():
                torch.testing.assert_close(found, model(batch), rtol=0.05, atol=0.05)
    assert calls and calls == sum(f.calls for f in families(model))


def test_calls_of_few_sizes_are_packed_between_others_however_many_there_were() -> None:
    """One by one they would be as many launches as there are sentences, not as there are lengths."""
    torch.manual_seed(3)
    model = AttentiveDecoder()
    batch = [Sentence(9 + n % 5) for n in range(30)]
    with torch.no_grad():
        for _ in range(8):  # of each length hundreds of calls
            model(batch)
        before = sum(f.calls for f in families(model))
        outputs = model(batch)
        calls = sum(f.calls for f in families(model)) - before
        with fxbatch.disabled():
            for ours, theirs in zip(outputs, model(batch), strict=True):
                torch.testing.assert_close(ours, theirs)
    assert calls > 1500, calls


def test_sizes_that_come_again_have_graphs_once_their_packed_calls_have_taken_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """While they wait for graphs they are packed; thereafter they are calls like others, all of a length at once."""
    torch.manual_seed(3)
    monkeypatch.setattr(AdaptiveSwitch, "on", True)
    monkeypatch.setattr(Strategy, "choose", lambda *_, **__: Choice(True))
    monkeypatch.setattr(Strategy, "loop_seconds", lambda *_, **__: 1.0)
    monkeypatch.setattr(BuildQueue, "may_build", lambda _, calls=None, **__: calls is None)
    built = False
    monkeypatch.setattr(BuildQueue, "_is_worth_building", lambda *_: built)

    class Default(AttentiveDecoder):
        forward = fxbatch.autobatch(AttentiveDecoder.forward.__wrapped__, out="list")

    model = Default()
    batch = [Sentence(9 + n % 5) for n in range(30)]
    packed = []
    with torch.no_grad():
        for minibatch in range(14):
            built = minibatch >= 7
            outputs = model(batch)
            packed.append(sum(f.calls for f in families(model)))
        with fxbatch.disabled():
            for ours, theirs in zip(outputs, model(batch), strict=True):
                torch.testing.assert_close(ours, theirs)
    assert packed[6] - packed[5] > 1500 and packed[-1] - packed[-2] < 500, packed


class Blending(Parser):
    """A pointer network, which blends all states of its sentence anew at each step, and gives them out twice."""

    @fxbatch.autobatch(adaptive=False, out="list")
    def forward(self, s: Sentence) -> tuple[torch.Tensor, ...]:
        states = self.encoder(self.embed(s.words))
        h = states[0]
        for i in range(len(s.words)):
            h = torch.tanh(h + self.out(states)[i].sum())
        return h, self.out(states), self.out(states)


@pytest.mark.parametrize("grad", [False, True])
def test_equal_packed_calls_are_one(grad: bool) -> None:
    torch.manual_seed(3)
    model = Blending().double()  # sums of so many numbers differ in the last digits of float32
    batch = [Sentence(n) for n in range(5, 35)]
    with torch.set_grad_enabled(grad):
        for _ in range(3):  # in the first functions are built
            model(batch)
        (projection,) = [f for f in families(model) if f.signature and "out" in f.signature.name]
        before = projection.calls
        found = model(batch)
        with fxbatch.disabled():
            wanted = model(batch)
    assert projection.calls - before == len(batch)
    gradients = []
    for results in (found, wanted) if grad else ():
        sum(x.square().sum() for each in results for x in each).backward()
        gradients.append([p.grad for p in model.parameters()])
        model.zero_grad()
    for mine, others in itertools.combinations(gradients, 2):
        torch.testing.assert_close(mine, others)
    for ours, theirs in zip(found, wanted, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b)
        ours[1].data.fill_(9.0)
        torch.testing.assert_close(ours[2], theirs[2])  # tensors of its own


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("share", [1.0, 0.5])
def test_where_functions_differ_a_forward_that_waits_goes_on(
    monkeypatch: pytest.MonkeyPatch, share: float, grad: bool
) -> None:
    """A phase whose packed calls were to run and did not has all its values in the run's memory, as if it had none."""
    torch.manual_seed(3)
    draw = random.Random(1)

    def differs(*_: object) -> None:
        if draw.random() < share:
            raise AssertionError("differs")

    monkeypatch.setattr(check, "check_against_body", differs)
    model = AttentiveDecoder()
    batch = [Sentence(n) for n in range(9, 39)]
    with torch.set_grad_enabled(grad):
        for _ in range(4):
            outputs = model(batch)
        with fxbatch.disabled():
            for ours, theirs in zip(outputs, model(batch), strict=True):
                torch.testing.assert_close(ours, theirs)


class SummedLosses(nn.Module):
    """A loss at each node of a chain, and the sum over their stack, of as many sizes as there are chains."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.Linear(8, 8), nn.Linear(8, 1)

    @fxbatch.autobatch(adaptive=False)
    def forward(self, s: Any) -> torch.Tensor:
        h, losses = torch.zeros(8), []
        for row in s:
            h = torch.tanh(self.cell(h)) + row
            losses.append(self.out(h)[0])
        return torch.stack(losses).sum()


def test_stacks_that_become_additions_don_t_run_between_others() -> None:
    torch.manual_seed(0)
    model = SummedLosses()
    with torch.no_grad():
        for lowest in (9, 10, 11, 9):
            batch = [list(torch.randn(n, 8)) for n in range(lowest, lowest + 50)]
            found = model(batch)
    assert families(model), "stacks of many sizes"
    assert [f.steps for f in families(model)] == [0]
    with torch.no_grad(), fxbatch.disabled():
        torch.testing.assert_close(found, model(batch))


class Viterbi(nn.Module):
    """Waits for a value at each row of what an encoder gives."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Embedding(50, 4), nn.Linear(4, 4))
        self.moves = nn.Parameter(torch.randn(4, 4))

    @fxbatch.autobatch(adaptive=False, out="list")
    def forward(self, sentence: Sentence) -> tuple[list[int], torch.Tensor]:
        best, score = [], torch.zeros(4)
        for scores in self.encoder(sentence.words):
            score, before = (score + self.moves).max(1)
            score = score + scores
            best.append(before.tolist())
        return best, score


def test_rows_that_later_phases_read_go_to_the_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the first phase: those after it are recorded calls alone, and no program is made anew for each."""
    made, left = [], packed_calls._Resolution.program_left
    monkeypatch.setattr(packed_calls._Resolution, "program_left", lambda *args: made.append(1) or left(*args))
    torch.manual_seed(0)
    model = Viterbi()
    for _ in range(4):
        sentences = [Sentence(n) for n in (3, 9, 12, 5, 7, 10, 11, 8)]
        made.clear()
        with torch.no_grad():
            results = model(sentences)
            with fxbatch.disabled():
                expected = model(sentences)
        for result, wanted in zip(results, expected, strict=True):
            assert result[0] == wanted[0]
            torch.testing.assert_close(result[1], wanted[1])
    assert 1 <= len(made) <= 2, "of twelve phases"


@pytest.mark.parametrize("grad", [False, True])
def test_calls_of_one_instance_are_packed_where_many_run_at_once(grad: bool) -> None:
    """One after the other they would be as many steps, each slower than the call."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

        @fxbatch.autobatch(adaptive=False, out="list")
        def forward(self, rows: list[torch.Tensor]) -> torch.Tensor:
            x = torch.stack(rows)
            for _ in range(6):
                x = self.layer(x)
            return x.sum()

    torch.manual_seed(3)
    model = Chain()

    many, one = [[list(torch.randn(n, 8)) for n in lengths] for lengths in (range(9, 39), [12])]
    with torch.set_grad_enabled(grad):
        for _ in range(3):  # functions are built
            model(many)
        for batch in (many, one):
            before = sum(f.steps for f in families(model))
            found = model(batch)
            with fxbatch.disabled():
                torch.testing.assert_close(found, model(batch))
            assert (sum(f.steps for f in families(model)) > before) == (batch is many)


def test_what_fakes_refuse_while_a_function_is_traced_is_not_logged() -> None:
    """`log_prob` asks whether all values are in the support, which no stand-in answers."""

    class Normal(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.Linear(4, 4)

        @fxbatch.autobatch(adaptive=False)
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mean = self.cell(x)
            torch.distributions.Normal(mean, mean.exp()).log_prob(x)
            return mean.sum()

    records: list[logging.LogRecord] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record)

    handler, model = Kept(), Normal()
    logging.getLogger("torch._subclasses.fake_tensor").addHandler(handler)
    try:
        check_equal(model, [torch.randn(n, 4) for n in range(3, 14)])
    finally:
        logging.getLogger("torch._subclasses.fake_tensor").removeHandler(handler)
    assert not records
