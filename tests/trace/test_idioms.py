"""Any idiom: one model written in many ways gives the same, nearly all calls take the short way, and no write, wait or
held value costs more for what came before it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxbatch
from benchmarks.idiom_models import WAYS, Sizes, Way, collect, random_tree
from fxbatch.trace.minibatch import record_minibatch
from fxbatch.trace.table import SignatureTable
from tests.lines import lines_of
from tests.oracle import check_equal

SIZES = Sizes(words=20, embedding=6, hidden=8)
TREES = 8

# Calls of an instance that Python records in minibatches whose calls were all met, the most there may be: to be lowered
# only. A stack of a number of parts that is new.
LONG_CALLS = {"attributes of nodes": 0.25}


def way(name: str) -> Way:
    torch.manual_seed(0)
    return WAYS[name](SIZES)


def trees(rng: random.Random) -> list[Any]:
    return [random_tree(rng, rng.randint(2, 10), SIZES.words) for _ in range(TREES)]


class OfSeeds(nn.Module):
    """Seeds -> the losses of new trees: whatever a way leaves on a tree is not there in the next run."""

    def __init__(self, way: Way) -> None:
        super().__init__()
        self.way = way

    def forward(self, seeds: list[int]) -> Tensor:
        return self.way([random_tree(random.Random(k), 2 + k, SIZES.words) for k in seeds])


@pytest.mark.parametrize("name", WAYS)
def test_every_way_equals_its_loop(name: str) -> None:
    check_equal(OfSeeds(way(name)), list(range(TREES)))


def test_states_left_on_nodes_can_be_read() -> None:
    model, batch = way("attributes of nodes"), trees(random.Random(1))
    model(batch)
    states = [tree.state for tree in batch]
    with fxbatch.disabled():
        model(batch)
    for tree, state in zip(batch, states, strict=True):
        for left, expected in zip(state, tree.state, strict=True):
            assert left.requires_grad and left.grad_fn is not None
            torch.testing.assert_close(left * 1, expected * 1)


def test_all_ways_are_the_same_function() -> None:
    batch = trees(random.Random(2))
    losses = [way(name)(batch) for name in WAYS]
    for other in losses[1:]:
        torch.testing.assert_close(other, losses[0])


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", WAYS)
def test_calls_that_were_met_take_the_short_way(name: str, grad: bool, recorded_by: str) -> None:
    model, table, rng = way(name), SignatureTable(), random.Random(3)
    counts = []
    for _ in range(6):
        batch = [((tree,), {}) for tree in trees(rng)]
        with torch.set_grad_enabled(grad):
            recording = record_minibatch(model.total, batch, table, None, runs_now=True)  # type: ignore[arg-type]
        recording.pending_program(recording.output_ids())
        counts.append(recording.recorder.long_calls / TREES)
    assert recorded_by == "python" or max(counts[2:]) <= LONG_CALLS.get(name, 0), counts


class Rows(Way):
    """States are rows of two tensors of zeros: torch itself can do so without gradients only."""

    def total(self, tree: Any) -> Any:
        order: list[Any] = []
        collect(tree, order)
        hidden, cells = torch.zeros(len(order), self.hidden), torch.zeros(len(order), self.hidden)
        row = {id(n): i for i, n in enumerate(order)}
        for i, n in enumerate(order):
            if n.left is None:
                hidden[i], cells[i] = self.leaf(self.embed(n.word))
            else:
                left, right = row[id(n.left)], row[id(n.right)]
                hidden[i], cells[i] = self.compose(hidden[left], cells[left], hidden[right], cells[right])
        return self.loss(hidden[-1], tree)


@torch.no_grad()
def test_a_row_that_was_written_is_read_without_the_others() -> None:
    """In the first minibatch, too, where no row of this number was read before; and what is dropped is not put
    together."""
    torch.manual_seed(0)
    model, batch = Rows(SIZES), trees(random.Random(3))
    recording = record_minibatch(
        model.total,  # type: ignore[arg-type]
        [((tree,), {}) for tree in batch],
        SignatureTable(),
        None,
        runs_now=True,
    )
    program = recording.pending_program(recording.output_ids())
    names = {program.signatures[s].name for s in set(program.sig.tolist())}
    assert not names & {"index_copy", "stack", "getitem"}
    losses = model(batch)
    with fxbatch.disabled():
        torch.testing.assert_close(losses, model(batch))


# -- what one call costs, after many and after few -------------------------------------------------------


class Sequences(nn.Module):
    """A form of writing `forward`, and an instance `[T, 4]`."""

    def __init__(self, form: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.form = nn.Linear(4, 4), form

    @fxbatch.autobatch(adaptive=False, out="list")
    def forward(self, x: Tensor) -> Any:
        return self.form(self, x)


def adds_to_a_total(m: Any, x: Tensor) -> Any:
    total = torch.zeros(())
    for row in x:
        total += m.linear(row).sum()
    return total


def fills_rows(m: Any, x: Tensor) -> Any:
    buffer = torch.zeros(len(x), 4)
    for i, row in enumerate(x):
        buffer[i] = m.linear(row)
    return buffer.sum(0)


def adds_to_rows(m: Any, x: Tensor) -> Any:
    buffer = torch.zeros(2, 4)
    for i, row in enumerate(x):
        buffer[i % 2] += m.linear(row)
    return buffer


def scales(m: Any, x: Tensor) -> Any:
    h = m.linear(x[0])
    for row in x:
        h = h + m.linear(row)
        h.mul_(row)
    return h


def waits(m: Any, x: Tensor) -> Any:
    h = m.linear(x[0])
    for row in x:
        h = m.linear(row) + h if h.sum() > 0 else m.linear(row) - h
    return h


def holds(m: Any, x: Tensor) -> Any:
    states = []
    for row in x:
        states.append(m.linear(row))
        states[-1].states = states
    return states[-1] * 2


def steps_between(form: Callable[[Any, Tensor], Any], few: tuple[int, int], many: tuple[int, int]) -> int:
    """By how many steps a minibatch of (instances, rows) takes more than another."""
    torch.manual_seed(0)
    model, counts = Sequences(form), []
    for instances, rows in (few, many):
        batch = [torch.randn(rows, 4) for _ in range(instances)]
        for _ in range(2):
            model(batch)
        counts.append(lines_of(lambda batch=batch: model(batch), "trace"))  # type: ignore[misc]
    return counts[1] - counts[0]


FEW = 4  # steps that come with no number of instances or rows
FORMS = (adds_to_a_total, fills_rows, adds_to_rows, scales, waits, holds)


@pytest.mark.parametrize("form", FORMS)
def test_an_instance_costs_the_same_after_many_as_after_few(form: Callable[[Any, Tensor], Any]) -> None:
    early = steps_between(form, (16, 4), (32, 4))
    late = steps_between(form, (240, 4), (256, 4))
    assert abs(late - early) <= 0.05 * early + FEW, (early, late)


@pytest.mark.parametrize("form", FORMS)
def test_a_write_or_wait_costs_the_same_after_many_as_after_few(form: Callable[[Any, Tensor], Any]) -> None:
    early = steps_between(form, (2, 16), (2, 32))
    late = steps_between(form, (2, 240), (2, 256))
    assert abs(late - early) <= 0.05 * early + FEW, (early, late)


def long_calls_of(form: Callable[[Any, Tensor], Any]) -> list[int]:
    """The long calls of each of four minibatches of eight instances."""
    model, table, counts = Sequences(form), SignatureTable(), []
    for _ in range(4):
        batch = [((model, torch.randn(6, 4)), {}) for _ in range(8)]
        recording = record_minibatch(form, batch, table, None, roots=(model,), runs_now=True)  # type: ignore[arg-type]
        recording.pending_program(recording.output_ids())
        counts.append(recording.recorder.long_calls)
    return counts


@pytest.mark.parametrize("form", [adds_to_a_total, fills_rows, adds_to_rows, scales])
def test_writes_that_were_met_take_the_short_way(
    form: Callable[[Any, Tensor], Any], recorded_by: str
) -> None:
    """One long call an instance, the first write to a real tensor, and as many a minibatch as there are rows."""
    counts = long_calls_of(form)
    assert recorded_by == "python" or max(counts[2:]) <= 2 * 8, counts


def predicts_without_gradients(m: Any, x: Tensor) -> Any:
    """What is right is counted at each step without gradients, as a metric is."""
    right, total = [], torch.zeros(())
    for row in x:
        h = torch.tanh(m.linear(row))
        with torch.no_grad():
            right.append((m.linear(h).argmax() == 1).float())
        total = total + h.sum()
        with torch.no_grad():
            h = h * 2
            with torch.enable_grad():
                total = total + m.linear(row).max()
    return total, torch.stack(right).mean()


def test_calls_between_changes_of_the_grad_mode_take_the_short_way(recorded_by: str) -> None:
    counts = long_calls_of(predicts_without_gradients)
    assert recorded_by == "python" or max(counts[2:]) == 0, counts
    model = Sequences(predicts_without_gradients)
    for _ in range(3):
        check_equal(model, list(torch.randn(5, 6, 4)))


def keeps_labels(m: Any, x: Tensor) -> Any:
    """A real tensor on the module, of another shape for each instance."""
    m.labels = torch.arange(1 + int(10 * x.detach()[0, 0].abs()))
    return torch.tanh(m.linear(x[0])).sum() + len(m.labels)


def test_a_tensor_of_another_shape_on_the_module_forgets_nothing(recorded_by: str) -> None:
    counts = long_calls_of(keeps_labels)
    assert recorded_by == "python" or max(counts[2:]) == 0, counts


class Masked(nn.Module):
    """An operation that reads a tensor which is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.mask = nn.Linear(4, 4), torch.ones(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.mask


def test_the_shape_of_a_tensor_that_an_operation_reads_counts() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = Masked()

        @fxbatch.autobatch(out="list", adaptive=False)
        def forward(self, x: Tensor) -> Tensor:
            return self.cell(torch.tanh(x))  # type: ignore[no-any-return]

    model = Net()
    for shape in ((4,), (1, 4), (2, 4), (4,)):
        model.cell.mask = torch.randn(shape)
        for _ in range(2):
            check_equal(model, list(torch.randn(3, 4)))


# -- places by several numbers ---------------------------------------------------------------------------


def fills_places(m: Any, x: Tensor) -> Any:
    scores = torch.zeros(len(x) + 1, 4)
    for i, row in enumerate(x):
        h = m.linear(row)
        for j in range(3):
            scores[i, j] = h[j] + scores[i - 1, j - 4]
        scores[i + 1, -1] += h[3]
    return scores.sum(0) + scores[-1]


def fills_places_with_rows(m: Any, x: Tensor) -> Any:
    states = m.linear(x).new_zeros(len(x), 2, 4)
    for i, row in enumerate(x):
        states[i, i % 2] = m.linear(row)
        states[i, 1 - i % 2] = states[i - 1, 0] + row
    return states.sum((0, 1))


def fills_rows_of_rows(m: Any, x: Tensor) -> Any:
    scores = torch.zeros(len(x), 4)
    for i, row in enumerate(x):
        h = m.linear(row)
        scores[i][0] = h[0]
        scores[i][-1] = h[1]
        scores[i][-1] += h[2]
    return scores.sum(0) + scores[0]


def fills_places_and_rows(m: Any, x: Tensor) -> Any:
    scores = m.linear(x) * 1.0
    first, seen = scores[0], []
    for i, row in enumerate(x):
        h = m.linear(row)
        scores[i, 1] = h[0]
        seen.append(scores[i] * 1.0)
        scores[i] = h
        scores[i, 2] = h[3]
        scores[i][3].add_(h[1])
        first[0] = h[2]
        seen.append(first + scores[:, 2].sum() + scores[i, 0])
    return torch.stack(seen).sum(0) + scores[1, 2]


def writes_places_without_gradients(m: Any, x: Tensor) -> Any:
    scores = torch.zeros(len(x), 4)
    for i, row in enumerate(x):
        h = m.linear(row)
        scores[i, 0] = h[0]
        with torch.no_grad():
            scores[i, 1] = h[1]
            scores[i][2] = h[2]
        scores[i, 3] = h[3]
    return scores.sum(0)


def writes_numbers(m: Any, x: Tensor) -> Any:
    scores, counts = m.linear(x) * 1.0, (m.linear(x).argmax(1) * 0).clone()
    for i in range(len(x)):
        scores[i, 0] = 0.5
        scores[i][1] = 2
        counts[i] = 3
        if i % 2:
            scores[i] = -1.0
    return scores.sum(0) * counts.sum() + scores[0] * counts[1]


PLACES = (
    writes_numbers,
    fills_places, fills_places_with_rows, fills_rows_of_rows, fills_places_and_rows, writes_places_without_gradients,
)  # fmt: skip


@pytest.mark.parametrize("form", PLACES)
def test_places_equal_the_loop(form: Callable[[Any, Tensor], Any], recorded_by: str) -> None:
    torch.manual_seed(0)
    model = Sequences(form)
    for _ in range(3):
        check_equal(model, list(torch.randn(6, 5, 4)))
    batch = list(torch.randn(6, 5, 4))
    with torch.no_grad():
        for ours, alone in zip(model(batch), [form(model, x) for x in batch], strict=True):
            torch.testing.assert_close(ours, alone)


@pytest.mark.parametrize("form", PLACES[:4])
def test_a_place_is_no_signature_of_its_own(form: Callable[[Any, Tensor], Any]) -> None:
    counts = []
    for rows in (5, 10):
        model, table = Sequences(form), SignatureTable()
        batch = [((model, torch.randn(rows, 4)), {}) for _ in range(4)]
        record_minibatch(form, batch, table, None, roots=(model,), runs_now=True)  # type: ignore[arg-type]
        counts.append(len(table.signatures))
    assert counts[1] <= counts[0], counts


def test_places_that_are_not_there_are_errors() -> None:
    def beyond(m: Any, x: Tensor) -> Any:
        h = m.linear(x)
        h[0, 7] = h[0, 1].clone()
        return h[0]

    with pytest.raises(IndexError):
        Sequences(beyond)([torch.randn(3, 4)] * 2)


# -- views of a module's parameters, which are another object each time -----------------------------------


def by_transposes(m: Any, x: Tensor) -> Any:
    h = torch.addmm(m.linear.bias, x, m.linear.weight.t())
    return torch.mm(h, m.linear.weight.T) + m.linear(x) @ m.linear.weight.t()


def by_slices(m: Any, x: Tensor) -> Any:
    first = torch.nn.functional.linear(m.linear(x), m.linear.weight[:2], m.linear.bias[:2])
    return first * torch.nn.functional.linear(m.linear(x), m.linear.weight[2:], m.linear.bias[2:])


def without_gradients_of_a_view(m: Any, x: Tensor) -> Any:
    with torch.no_grad():
        turned = m.linear.weight.t()
    return m.linear(x) @ turned + m.linear(x) @ m.linear.weight.t()


def by_many_rows(m: Any, x: Tensor) -> Any:
    return sum(m.linear(x) * m.linear.weight[i % 4] for i in range(len(x)))


VIEWED = (by_transposes, by_slices, without_gradients_of_a_view, by_many_rows)


@pytest.mark.parametrize("form", VIEWED)
def test_views_of_parameters_equal_the_loop(form: Callable[[Any, Tensor], Any]) -> None:
    torch.manual_seed(0)
    model = Sequences(form)
    for _ in range(3):
        check_equal(model, list(torch.randn(6, 5, 4)))


@pytest.mark.parametrize("form", [by_transposes, by_slices])
def test_views_that_were_met_take_the_short_way(form: Callable[[Any, Tensor], Any], recorded_by: str) -> None:
    counts = long_calls_of(form)
    assert recorded_by == "python" or max(counts[2:]) == 0, counts


class Unfilled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    @fxbatch.autobatch(adaptive=False)
    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        total = h.new(4).fill_(1.0) + h.new_empty(4).zero_() + torch.empty_like(h).fill_(2.0)
        for size in (h.size(), (4,)):
            total = total + h.detach().new(*size).zero_()
        return h * total + h.new([1.0, 2.0, 3.0, 4.0])


def test_new_memory_that_is_filled_batches() -> None:
    """What it holds before can't be compared with anything."""
    torch.manual_seed(0)
    model = Unfilled()
    check_equal(model, list(torch.randn(6, 4)))
    assert all(row.batched for row in fxbatch.explain(model, list(torch.randn(6, 4))).operations)
