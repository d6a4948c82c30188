"""Packed calls on what cells compute: stacks of another number of rows in each instance, and what reads them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxbatch
from fxbatch.ir import CONSTANT_KINDS
from fxbatch.runtime.packed_calls import LONG, MEMBERS, MOST
from fxbatch.runtime.packed_route import SECONDS, PackedRoute
from tests.oracle import check_equal

SIZE = 6


class Cells(nn.Module):
    """A cell over the words of a sentence, its states stacked."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell = nn.Embedding(20, SIZE), nn.GRUCell(SIZE, SIZE)
        self.query, self.out = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, 4)

    def states(self, words: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        h, found = torch.zeros(SIZE, dtype=self.out.weight.dtype), []
        for w in words:
            h = self.cell(self.embed(torch.tensor(w)), h)
            found.append(h)
        return torch.stack(found), h


class Attention(Cells):
    @fxbatch.autobatch
    def forward(self, words: list[int]) -> torch.Tensor:
        states, h = self.states(words)
        return self.out(torch.softmax(states @ self.query(h), 0) @ states)


class Tagger(Cells):
    @fxbatch.autobatch
    def forward(self, words: list[int]) -> torch.Tensor:
        states, _ = self.states(words)
        return F.cross_entropy(self.out(states), torch.tensor([w % 4 for w in words]))


class Rows(Cells):
    """What it gives has a size of its own, and a value is asked for after that."""

    @fxbatch.autobatch(out="list")
    def forward(self, words: list[int]) -> Any:
        states, h = self.states(words)
        scores = torch.tanh(states)
        return {"scores": scores, "last": scores[-1] + h, "states": states, "n": len(words)}


class Decoder(Cells):
    """Attends to the states as often as it is told: each time needs what the cell made of the one before."""

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps

    @fxbatch.autobatch
    def forward(self, words: list[int]) -> torch.Tensor:
        states, h = self.states(words)
        for _ in range(self.steps):
            h = self.cell(torch.softmax(states @ h, 0) @ states, h)
        return self.out(h)


class Asking(Cells):
    """The value that is asked for waits for what is stacked."""

    @fxbatch.autobatch
    def forward(self, words: list[int]) -> torch.Tensor:
        states, h = self.states(words)
        best = int((states @ self.query(h)).argmax())
        return self.out(states[best] + h)


class Partly(Cells):
    """States of some words go without gradients, and a parameter is met as it is."""

    @fxbatch.autobatch
    def forward(self, words: list[int]) -> torch.Tensor:
        states, h = self.states(words)
        with torch.no_grad():
            weights = torch.softmax(states @ h, 0)
        return self.out(weights @ states) + self.out.bias * states.detach().mean()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "attention": Attention, "tagger": Tagger, "rows": Rows, "decoder": lambda: Decoder(2), "asking": Asking,
    "partly": Partly,
}  # fmt: skip


def sentences(seed: int, lengths: list[int]) -> list[list[int]]:
    r = random.Random(seed)
    return [[r.randrange(20) for _ in range(n)] for n in lengths]


FIRST = [LONG + 1, 3, 5, 2, 7]  # of these families are made


def engine_of(model: nn.Module) -> Any:
    return next(iter(model.__dict__["_fxbatch_engines"].values()))


def built(model: nn.Module) -> int:
    """How many operations have graphs."""
    made = engine_of(model).operations._entries.values()
    return sum(c.signature.operation.kind not in CONSTANT_KINDS for c in made)


def packed_calls(model: nn.Module) -> dict[str, int]:
    return {f.signature.name: f.calls for f in engine_of(model).packed_calls.families if f.signature}


@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients(name: str) -> None:
    torch.manual_seed(0)
    model = MODELS[name]()
    for k, lengths in enumerate((FIRST, [4, 1, 20, 1])):
        check_equal(model, sentences(k, lengths))
    with torch.no_grad():
        check_equal(model, sentences(2, [6, 13]), gradients=False)


@pytest.mark.parametrize("name", MODELS)
def test_inference_runs_them_as_its_phase_begins(name: str, monkeypatch: Any) -> None:
    """What packed calls wait for is run in the memory of the minibatch, and not as one of its own."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    model(sentences(0, FIRST))
    monkeypatch.setattr(
        "fxbatch.runtime.packed_calls._run_first", lambda *args: pytest.fail("a run of its own")
    )
    with torch.no_grad():
        for k in range(3):
            before = sum(packed_calls(model).values())
            draw = random.Random(k)
            check_equal(model, sentences(k, [draw.randint(1, 14) for _ in range(40)]), gradients=False)
        assert sum(packed_calls(model).values()) >= before + 40


@pytest.mark.parametrize("name", ["attention", "rows"])
def test_new_lengths_build_nothing(name: str) -> None:
    model = MODELS[name]()
    model(sentences(0, FIRST))
    model(sentences(1, [4, 6, 10]))
    before, calls = built(model), packed_calls(model)["stack"]
    model(sentences(2, [12, 8, 15, 21]))
    assert built(model) == before
    assert packed_calls(model)["stack"] == calls + 4


def test_what_waits_for_one_another_too_often_runs_as_any_other() -> None:
    model = Decoder(MOST + 1)
    check_equal(model, sentences(0, FIRST))
    assert packed_calls(model) and not any(packed_calls(model).values())
    families = engine_of(model).packed_calls.families
    assert not any(f.function for f in families), "and no function is built for it"


@pytest.mark.parametrize("steps", [1, MOST + 1])
def test_functions_that_are_of_no_use_make_further_ones_dear(steps: int, monkeypatch: Any) -> None:
    """Those of which no call could run in a whole minibatch: functions of numbers are built without a look at that."""

    class Mixed(Decoder):
        @fxbatch.autobatch(adaptive=False)
        def forward(self, words: list[int], more: bool) -> torch.Tensor:
            states, h = self.states(words)
            states = torch.relu(states) * 2 if more else states
            for _ in range(self.steps):
                h = self.cell(torch.softmax(states @ h * 0.5, 0) @ states, h)
            return self.out(h)

    monkeypatch.setattr(PackedRoute, "seconds_to_try", 0.5)
    model, asked = Mixed(steps), list[float]()
    model(sentences(0, FIRST[:1]), [False])
    engine_of(model).packed_calls.may_try = lambda seconds: asked.append(seconds) or True
    check_equal(model, sentences(0, FIRST), [False] * len(FIRST))
    first = set(asked)
    functions = [f for f in engine_of(model).packed_calls.families if f.function is not None]
    asked.clear()
    check_equal(model, sentences(1, FIRST), [True] * len(FIRST))
    assert functions and first == {0.5, SECONDS}, "the first of a process imports what is for symbols"
    assert set(asked) == {SECONDS, SECONDS * (1 if steps == 1 else 1 + len(functions))}


def test_stacks_of_few_rows_are_no_family() -> None:
    """Children of a node: there are many stacks, in each other."""

    class Tree(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.leaf, self.join = nn.Embedding(20, SIZE), nn.Linear(SIZE, SIZE)

        def encode(self, tree: Any) -> torch.Tensor:
            if isinstance(tree, int):
                return self.leaf(torch.tensor(tree))
            return torch.tanh(self.join(torch.stack([self.encode(x) for x in tree]).amax(0)))

        @fxbatch.autobatch
        def forward(self, tree: Any) -> torch.Tensor:
            return self.encode(tree).sum()

    model = Tree()
    trees = [[1, 2, [3, 4, 5]], [[1, 2, 3, 4], 7], [1, 2, 3, 4, [5]], [[1], [2, [3, 4, 5, 6, 7]]]]
    assert max(map(len, trees)) < LONG
    assert len({k for t in trees for k in (len(t),)}) + 1 >= MEMBERS
    for _ in range(2):
        check_equal(model, trees)
    assert not packed_calls(model)


def test_sums_over_the_neighbours_of_many_nodes_are_additions() -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.message = nn.Embedding(20, SIZE), nn.Linear(SIZE, SIZE)

        @fxbatch.autobatch
        def forward(self, neighbours: list[list[int]]) -> torch.Tensor:
            h = [self.embed(torch.tensor(i % 20)) for i in range(len(neighbours))]
            for _ in range(2):
                sent = [self.message(x) for x in h]
                h = [torch.tanh(torch.stack([sent[j] for j in n]).sum(0)) for n in neighbours]
            return torch.stack(h).mean(0)

    def star(n: int) -> list[list[int]]:
        """A node that all others hang on, which hang on their neighbours too."""
        return [list(range(n)), *[[0, i, *range(1, i % 4)] for i in range(1, n)]]

    model = Graph()
    check_equal(model, [star(n) for n in (LONG + 2, 5, 6, 7)])
    before = packed_calls(model)["stack"]
    model([star(n) for n in (9, 8, 4, 12)])
    assert packed_calls(model)["stack"] == before


def test_the_nodes_of_a_tree_are_a_memory() -> None:
    torch.manual_seed(1)

    class Memory(Cells):
        def encode(self, tree: Any, found: list[torch.Tensor]) -> torch.Tensor:
            if isinstance(tree, int):
                h = self.embed(torch.tensor(tree))
            else:
                h = self.cell(self.encode(tree[0], found), self.encode(tree[1], found))
            found.append(h)
            return h

        @fxbatch.autobatch
        def forward(self, tree: Any) -> torch.Tensor:
            nodes: list[torch.Tensor] = []
            h = self.encode(tree, nodes)
            memory = torch.stack(nodes)
            return self.out(torch.softmax(memory @ self.query(h), 0) @ memory)

    def tree(n: int) -> Any:
        return n % 20 if n < 2 else (tree(n // 2), tree(n - n // 2))

    model = Memory()
    for sizes in ((9, 2, 3, 5, 4), (6, 7, 8, 1)):
        check_equal(model, [tree(n) for n in sizes])
    assert packed_calls(model)["stack"] > 0


class Chart(nn.Module):
    """The inside algorithm over the spans of a sentence: rows of a packed encoder, then stacks of what they score."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 6)
        self.encoder = nn.LSTM(6, 4, bidirectional=True, batch_first=True)
        self.span = nn.Linear(16, 1)

    @fxbatch.autobatch
    def forward(self, words: torch.Tensor) -> torch.Tensor:
        h = self.encoder(self.embed(words)[None])[0][0]
        n = len(words)
        chart = {(i, i + 1): self.span(torch.cat([h[i], h[i]]))[0] for i in range(n)}
        for length in range(2, n + 1):
            for i in range(n - length + 1):
                j = i + length
                splits = torch.stack([chart[i, k] + chart[k, j] for k in range(i + 1, j)])
                chart[i, j] = torch.logsumexp(splits, 0) + self.span(torch.cat([h[i], h[j - 1]]))[0]
        return chart[0, n]


@pytest.mark.parametrize("seed", [7])
def test_values_are_numbered_anew_after_a_segment(seed: int) -> None:
    torch.manual_seed(seed)
    model, draw = Chart(), random.Random(seed)
    for _ in range(4):
        sentences = [torch.randint(0, 9, (draw.randint(1, 5),)) for _ in range(6)]
        result = model(sentences)
        with fxbatch.disabled():
            torch.testing.assert_close(result, model(sentences))


def test_explain_tells_of_them() -> None:
    model = Attention()
    model(sentences(0, FIRST))
    model(sentences(1, [4, 6, 10]))
    text = str(fxbatch.explain(model, sentences(2, [12, 8, 15, 21])))
    assert "packed: stack of rows f32[6]" in text
    assert "packed: softmax(f32[*])" in text
    assert "f32[21,6]" not in text
