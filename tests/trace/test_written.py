"""Writes of values to real tensors: the tensor stands for a value until the call is over, as the loop leaves it."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import fxbatch
from fxbatch.errors import InPlaceError, TraceError
from fxbatch.trace.minibatch import record_minibatch
from fxbatch.trace.state import current_recorder
from fxbatch.trace.table import SignatureTable
from fxbatch.trace.values import WrittenTensor
from tests.oracle import check_equal

SIZE = 4


class Parts(nn.Module):
    """A layer, a table, and something that is no parameter."""

    def __init__(self, code: Callable[[Parts, torch.Tensor], Any], **options: Any) -> None:
        super().__init__()
        self.l, self.table = nn.Linear(SIZE, SIZE), nn.Parameter(torch.randn(3, SIZE))
        self.register_buffer("zeros", torch.zeros(SIZE))
        self.plain = torch.zeros(SIZE)
        self.code = code
        self.batched = fxbatch.autobatch(**{"adaptive": False, **options})(self.forward)

    def forward(self, x: torch.Tensor) -> Any:
        return self.code(self, x)


def accumulated(m: Parts, x: torch.Tensor) -> Any:
    total = torch.zeros(SIZE, dtype=x.dtype)
    for i in range(3):
        total += m.l(x) * i
    return total


def items(m: Parts, x: torch.Tensor) -> Any:
    rows = torch.zeros(3, SIZE, dtype=x.dtype)
    for i in range(3):
        rows[i] = m.l(x) + i
    rows[1] += m.l(x)
    rows[:, 0] *= 2
    return rows.sum(0), rows[2]


def loss(m: Parts, x: torch.Tensor) -> Any:
    total = torch.tensor(0.0, dtype=x.dtype)
    total += m.l(x).square().sum()
    total += (m.l(x) * 2).sum()
    return total / 2


def from_a_table(m: Parts, x: torch.Tensor) -> Any:  # as torchcrf begins its scores
    score = m.table[torch.tensor([1])]
    score += m.l(x)
    score = score + m.table[2]
    score += m.table[0]
    return score


def in_a_list(m: Parts, x: torch.Tensor) -> Any:
    sums = [torch.zeros(SIZE, dtype=x.dtype) for _ in range(2)]
    for i in range(4):
        sums[i % 2] += m.l(x) * i
    return torch.stack(sums), {"first": sums[0]}


def read_before(m: Parts, x: torch.Tensor) -> Any:
    t = torch.ones(SIZE, dtype=x.dtype)
    before = m.l(x) + t
    t.mul_(m.l(x).detach())
    after = before + t
    t.zero_()
    return before, after, t + m.l(x)


def alone(m: Parts, x: torch.Tensor) -> Any:
    t = torch.ones(2, SIZE, dtype=x.dtype)
    t[0] = m.l(x)
    rows = list(t)
    shape, length = t.shape, len(t)
    assert shape == (2, SIZE) and length == 2 and t.dtype == x.dtype and t.dim() == 2 and t.ndim == 2
    assert t.requires_grad and not t.is_leaf and isinstance(t, torch.Tensor) and torch.is_tensor(t)
    return t.sum(), t.T, torch.cat(rows), m.l(t[1]), m.l(t), torch.stack([t, t]), t.clone().tanh_(), -t, 2 - t


def copied(m: Parts, x: torch.Tensor) -> Any:
    t = torch.empty(SIZE, dtype=x.dtype)
    t.copy_(m.l(x))
    u = torch.zeros(3, SIZE, dtype=x.dtype)
    u.index_add_(0, torch.tensor([0, 2]), torch.stack([t, t]))
    w = torch.zeros(SIZE, dtype=x.dtype)
    w.scatter_(0, torch.tensor([1, 3]), m.l(x)[:2])
    return t, u, w


def without_gradients(m: Parts, x: torch.Tensor) -> Any:
    t = torch.zeros(SIZE, dtype=x.dtype)
    with torch.no_grad():
        t += m.l(x)
    return m.l(t), t


def across_a_wait(m: Parts, x: torch.Tensor) -> Any:
    t = torch.zeros(SIZE, dtype=x.dtype)
    t += m.l(x)
    if t.sum() > 0:
        t += m.l(x)
    for _ in range(int(t[0] > 0)):
        t[1] += 1
    return t.clone(), t


def after_a_wait(m: Parts, x: torch.Tensor) -> Any:
    t, score = torch.ones(SIZE, dtype=x.dtype), m.table[1] * 2
    y = m.l(x) + t + score
    if y.sum() > -100:
        t += y
        score += y
    return y, t, score, y + t


def under_a_row_read_before_a_wait(m: Parts, x: torch.Tensor) -> Any:
    best, scores = torch.zeros(3, SIZE, dtype=x.dtype), torch.zeros(4, SIZE, dtype=x.dtype)
    for i in range(3):
        y = best[i] + m.l(x) + scores[i]
        if y.sum() > -1:
            best[i] = y
        scores[0] = i  # what was read of it has been computed by the wait
        if (y.sum() + 1) < 0:
            scores[i + 1] = y
    return best, scores


def functions(m: Parts, x: torch.Tensor) -> Any:
    def add(into: torch.Tensor) -> None:
        into += m.l(x)

    t, u = torch.zeros(SIZE, dtype=x.dtype), torch.zeros(SIZE, dtype=x.dtype)
    add(t)
    add(t)
    u += t
    add(u)
    return {"t": t, "u": u}


def integers(m: Parts, x: torch.Tensor) -> Any:
    counts = torch.zeros(2, dtype=torch.int64)
    counts += (m.l(x)[:2] > 0).long()
    return counts, m.l(x)


def written_into_others(m: Parts, x: torch.Tensor) -> Any:  # as a stack of states is put back where a mask is
    row, stack, mask = (
        torch.zeros(SIZE, dtype=x.dtype),
        torch.zeros(3, SIZE, dtype=x.dtype),
        torch.zeros(3).bool(),
    )
    row[torch.tensor([1])] = m.l(x)[:1]
    mask[1] = m.l(x)[0] < 2**10
    rows = stack[torch.tensor([False, True, False])]
    rows[torch.tensor([0]), torch.tensor([2])] = m.l(x)[2]
    stack[torch.tensor([False, True, False])] = rows
    stack[2] = row
    picked = torch.arange(3.0, dtype=x.dtype)
    picked[mask] = 5
    return stack, picked, picked.add_(row[1])


def chosen_by_values(m: Parts, x: torch.Tensor) -> Any:
    rows, flat = m.l(x).view(2, 2), m.l(x) * 1
    i, j = rows.sum(1).argmax(), flat.argmin()
    before = rows[i]
    rows[i].mul_(2.0)
    rows[i][:1].add_(1.0)
    rows[i] += flat[j]
    flat[j].neg_()
    rows[i].detach().mul_(3.0)
    return rows, before.square(), flat.square(), rows[i - 1]


def counted(m: Parts, x: torch.Tensor) -> Any:
    count, states = torch.zeros(SIZE, dtype=x.dtype), torch.zeros(3, SIZE, dtype=x.dtype)
    seen = torch.zeros(SIZE, dtype=torch.bool)
    h = m.l(x)
    for _ in range(3):
        best = h.argmax()
        row = states[best % 3]
        count[best] += 1
        count[h.argmin()].sub_(0.5)
        states[best % 3].add_(h)
        states[0] = h
        seen[best] |= True
        h = (m.l(h) + row.clone() * count.clone()).masked_fill(seen.clone(), 0.0)
    return h.sum(), states.sum(0), count * h


def rows_of_a_parameter_stored(m: Parts, x: torch.Tensor) -> Any:
    h, i = torch.stack([m.l(x), m.l(x) * 2]), torch.tensor(1)
    h[i] = m.table[1]
    h[i, :2] = m.table[2, :2]
    h[0, i] = m.zeros[1]
    return h, m.table[:, m.l(x).argmax() % SIZE] * h[0, 0]


def read_before_data_is_written(m: Parts, x: torch.Tensor) -> Any:
    rows, others = torch.ones(3, SIZE, dtype=x.dtype), torch.ones(3, SIZE, dtype=x.dtype)
    y, z = m.l(x) + rows[1], m.l(x) + others[1]
    rows.data[1] = 5.0
    others[1].data.fill_(7.0)
    return y, z, y + rows[1], z + others[1]


def places_read_before_a_write(m: Parts, x: torch.Tensor) -> Any:
    rows, h = torch.zeros(3, SIZE, dtype=x.dtype), m.l(x)
    j = h.argmax()
    column, place = rows[..., j], rows[1, j]
    rows.fill_(0.25)
    return column + h[0], place + h[1]


CODES = (
    accumulated, items, loss, from_a_table, in_a_list, read_before, alone, copied, without_gradients, across_a_wait,
    after_a_wait, under_a_row_read_before_a_wait, functions, integers, written_into_others, chosen_by_values, counted,
    places_read_before_a_write, rows_of_a_parameter_stored, read_before_data_is_written,
)  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "autograd": {"backward": "autograd"},
    "unrolled": {"mode": "unrolled"},
    "fold": {"schedule": "fold"},
    "list": {"out": "list"},
    "checked": {"check": 1},
}


def leaves(x: Any) -> list[torch.Tensor]:
    return [t for t in torch.utils._pytree.tree_leaves(x) if isinstance(t, torch.Tensor)]


def gradients(model: Parts, found: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    model.zero_grad()
    wanted = [t for t in found if t.requires_grad]
    if wanted:
        torch.stack(
            [(t * torch.arange(1.0, t.numel() + 1).view(t.shape)).sum() for t in wanted]
        ).sum().backward()
    return [p.grad for p in model.parameters()]


def assert_equals_the_loop(code: Any, **options: Any) -> None:
    torch.manual_seed(0)
    model = Parts(code, **options).double()
    xs = list(torch.randn(5, SIZE, dtype=torch.float64))
    for _ in range(2):
        found = leaves(model.batched(xs))
        with fxbatch.disabled():
            expected = leaves(model.batched(xs))
        assert [type(t) for t in found] == [torch.Tensor] * len(expected)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(gradients(model, found), gradients(model, expected))


def test_what_differs_from_the_loop_is_told() -> None:
    recording = lambda: current_recorder() is not None  # noqa: E731
    for wrong in (
        lambda m, x: m.l(x) + 0.5 if recording() else m.l(x),
        lambda m, x: m.l(x).detach() + 0 * m.l(x) if recording() else m.l(x),
    ):
        with pytest.raises(AssertionError):
            assert_equals_the_loop(wrong)


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.__name__)
def test_a_tensor_that_a_value_is_written_to_is_a_value(code: Any) -> None:
    assert_equals_the_loop(code)


@pytest.mark.parametrize("way", WAYS)
def test_in_other_ways(way: str) -> None:
    for code in (items, after_a_wait, under_a_row_read_before_a_wait):
        assert_equals_the_loop(code, **WAYS[way])


@pytest.mark.parametrize("code", [items, copied, functions], ids=lambda code: code.__name__)
def test_without_gradients(code: Any) -> None:
    with torch.no_grad():
        assert_equals_the_loop(code)


def test_it_batches() -> None:
    model = Parts(accumulated)
    found = fxbatch.explain(model.batched, list(torch.randn(8, SIZE)))
    assert found.launches_before >= 24 and found.launches_after < 10


def test_what_outlives_the_call_is_as_the_loop_leaves_it() -> None:
    kept: list[torch.Tensor] = []
    shared = torch.zeros(SIZE)

    def code(m: Parts, x: torch.Tensor) -> Any:
        t = torch.zeros(SIZE)
        t += m.l(x)
        kept.append(t)
        m.plain += m.l(x).detach()
        shared.add_(m.plain)
        return t * shared

    model, xs = Parts(code), list(torch.randn(3, SIZE))
    batched = [model.batched(xs), *kept, model.plain.clone(), shared.clone()]
    assert all(type(t) is torch.Tensor for t in (*kept, model.plain, shared))
    kept.clear(), model.plain.zero_(), shared.zero_()
    with fxbatch.disabled():
        expected = [model.batched(xs), *kept, model.plain.clone(), shared.clone()]
    torch.testing.assert_close(batched, expected)
    sum(t.sum() for t in batched[1:4]).backward()
    assert model.l.weight.grad is not None


def test_what_nobody_keeps_is_not_computed() -> None:
    def code(m: Parts, x: torch.Tensor) -> Any:
        t = torch.zeros(SIZE)
        t += m.l(x).exp().sin()
        return m.l(x)

    found = fxbatch.explain(Parts(code, fuse=False).batched, list(torch.randn(3, SIZE)))
    assert found.launches_after == 1


def test_an_error_leaves_tensors_as_they_were() -> None:
    kept: list[torch.Tensor] = []

    def code(m: Parts, x: torch.Tensor) -> Any:
        t = torch.ones(SIZE)
        t += m.l(x)
        kept.append(t)
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        Parts(code).batched(list(torch.randn(3, SIZE)))
    assert [type(t) for t in kept] == [torch.Tensor] and kept[0].tolist() == [1.0] * SIZE


def test_results_that_can_not_be_stacked_leave_plain_tensors() -> None:
    kept: list[torch.Tensor] = []

    def code(m: Parts, x: torch.Tensor) -> Any:
        t = torch.zeros(SIZE)
        t += m.l(x)
        kept.append(t)
        return m.l(x)[: len(kept)]

    with pytest.raises(fxbatch.FxbatchError, match="different shapes"):
        Parts(code).batched(list(torch.randn(3, SIZE)))
    assert [type(t) for t in kept] == [torch.Tensor] * 3


def refused(code: Any, match: str, error: type[Exception] = InPlaceError) -> None:
    with pytest.raises(error, match=match):
        Parts(code).batched(list(torch.randn(3, SIZE)))
    gc.collect()
    assert not [x for x in gc.get_objects() if type(x) is WrittenTensor]


def test_what_shares_memory_is_refused() -> None:
    def through_one_of_two_views(m: Parts, x: torch.Tensor) -> Any:
        t = torch.zeros(2, SIZE)
        row, other = t[0], t[1]
        row += m.l(x)
        return t + other

    def under_a_view(m: Parts, x: torch.Tensor) -> Any:
        t = torch.zeros(2, SIZE)
        row = t[0]
        t += m.l(x)
        return row

    def detached(m: Parts, x: torch.Tensor) -> Any:
        t = torch.zeros(SIZE)
        same = t.detach()
        t += m.l(x)
        return same

    def numpy(m: Parts, x: torch.Tensor) -> Any:
        t = torch.zeros(SIZE)
        array = t.numpy()
        t += m.l(x)
        return array

    refused(through_one_of_two_views, "another tensor shares its memory.*test_written.py")
    refused(under_a_view, "shares its memory")
    refused(detached, "shares its memory")
    refused(numpy, "shares its memory")


def test_a_leaf_that_wants_a_gradient_is_refused_as_by_torch() -> None:
    def code(m: Parts, x: torch.Tensor) -> Any:
        t = torch.zeros(SIZE, requires_grad=True)
        t += m.l(x)
        return t

    refused(code, "a leaf Variable that requires grad", RuntimeError)


def test_reading_it_past_torch_is_an_error() -> None:
    scripted = torch.jit.script(_double)

    def code(m: Parts, x: torch.Tensor) -> Any:
        t = torch.zeros(SIZE)
        t += m.l(x)
        return scripted(t)

    refused(code, "is TorchScript", TraceError)


def _double(t: torch.Tensor) -> torch.Tensor:
    return t * 2


@pytest.mark.filterwarnings("ignore:To copy construct")
def test_a_copy_reads_what_was_written() -> None:
    def code(m: Parts, x: torch.Tensor) -> Any:
        t = torch.zeros(SIZE, dtype=x.dtype)
        t += m.l(x)
        return torch.tensor(t), torch.tensor([t[0].item(), 1.0]), t.detach().numpy().sum(), t.tolist()[1]

    assert_equals_the_loop(code)


def test_traces_ahead_and_lazy() -> None:
    model, xs = Parts(items), list(torch.randn(6, SIZE))
    expected = model.batched(xs)
    data = fxbatch.TracedDataset(model.batched, xs)
    torch.testing.assert_close(model.batched([data[i] for i in range(6)]), expected)

    shared = torch.zeros(SIZE)

    def code(m: Parts, x: torch.Tensor) -> Any:
        shared.add_(m.l(x).detach())
        return m.l(x) + shared

    model = Parts(code)
    traced = fxbatch.TracedDataset(model.batched, xs)[0]
    assert traced.trace is None and "outlives" in traced.reason and shared.tolist() == [0.0] * SIZE

    layer, total = nn.Linear(SIZE, SIZE), torch.zeros(SIZE)
    with fxbatch.lazy(layer):
        for x in xs:
            total += layer(x)
    assert type(total) is torch.Tensor
    torch.testing.assert_close(total, copy.deepcopy(layer)(torch.stack(xs)).sum(0))


class Chain(nn.Module):
    """Scores of a linear chain, written as the package torchcrf writes them: in place, on parameters' items."""

    def __init__(self, tags: int = 3) -> None:
        super().__init__()
        self.embed, self.begin, self.end = (
            nn.Embedding(9, tags),
            nn.Parameter(torch.randn(tags)),
            nn.Parameter(torch.randn(tags)),
        )
        self.step = nn.Parameter(torch.randn(tags, tags))

    @fxbatch.autobatch(adaptive=False)
    def forward(self, words: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
        emissions, tags, one = self.embed(words).unsqueeze(1), tags.unsqueeze(1), torch.arange(1)
        mask = torch.ones(len(words), 1, dtype=torch.bool)
        score = self.begin[tags[0]]
        score += emissions[0, one, tags[0]]
        whole = self.begin + emissions[0]
        for i in range(1, len(words)):
            score += self.step[tags[i - 1], tags[i]] * mask[i].to(score.dtype)
            score += emissions[i, one, tags[i]]
            following = torch.logsumexp(whole.unsqueeze(2) + self.step + emissions[i].unsqueeze(1), dim=1)
            whole = torch.where(mask[i].unsqueeze(1), following, whole)
        score += self.end[tags[-1]]
        whole += self.end
        return (torch.logsumexp(whole, dim=1) - score).sum()


def test_a_chain_as_torchcrf_writes_it() -> None:
    torch.manual_seed(0)
    model = Chain().double()
    words = [torch.randint(9, (n,)) for n in (3, 1, 4)]
    tags = [torch.randint(3, (len(w),)) for w in words]
    found = []
    for batched in (True, False):
        model.zero_grad()
        if batched:
            losses = model(words, tags)
        else:
            with fxbatch.disabled():
                losses = model(words, tags)
        losses.sum().backward()
        found.append([losses.detach(), *[p.grad.clone() for p in model.parameters() if p.grad is not None]])
    assert len(found[0]) == 5
    torch.testing.assert_close(found[0], found[1])


class Recurrence(nn.Module):
    """Rows of a buffer, each made of the sum of those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(SIZE, SIZE)

    @fxbatch.autobatch(adaptive=False)
    def forward(self, rows: torch.Tensor) -> Any:
        buffer, total = torch.zeros(3, SIZE), torch.zeros(SIZE)
        for i, row in enumerate(rows):
            buffer[i] = self.cell(row, total)
            total += buffer[i]
        return buffer, total


def test_rows_of_a_buffer_that_are_written_with_numbers_and_read_back() -> None:
    model, instances = Recurrence(), [torch.randn(3, SIZE) for _ in range(4)]
    with fxbatch.disabled():
        expected = model(instances)
    for _ in range(2):
        torch.testing.assert_close(model(instances), expected)


def of_each_kind(m: Parts, x: torch.Tensor) -> Any:
    """Tensors of factories: of sizes, tuples, numbers and types of their own; some are given back as they were made."""
    total, one, half = torch.zeros(SIZE), torch.ones((SIZE,)), torch.full((SIZE,), 0.5)
    loss, whole, rows = torch.tensor(0.0), torch.tensor(0), torch.empty(2, SIZE, dtype=torch.float32)
    h = m.l(x)
    if h.sum() > 0:
        total += h
        one *= h
    half.mul_(h)
    loss += h.sum()
    whole += 2
    rows[0], rows[1] = h, 2 * h
    return total, one, half, loss, whole, rows


def without_python(m: Parts, x: torch.Tensor) -> Any:
    h = m.l(x)
    made = [torch.zeros(h.size()), torch.ones(SIZE, device="cpu"), torch.zeros((2, SIZE), dtype=h.dtype)[0]]
    made += [torch.tensor(0.5), torch.full((SIZE,), 2.0), torch.empty(2, SIZE)]
    for t in made[:5]:
        t *= h.sum() if t.dim() == 0 else h
    made[5][0], made[5][1] = h, h * 2
    return tuple(made)


def test_writes_to_what_factories_give_pass_no_python(recorded_by: str) -> None:
    model, table, counts = Parts(without_python), SignatureTable(), []
    for _ in range(4):
        recording = record_minibatch(
            model.forward, [((torch.randn(SIZE),), {}) for _ in range(3)], table, None, runs_now=True
        )  # type: ignore[arg-type]
        recording.pending_program(recording.output_ids())
        counts.append(recording.recorder.long_calls)
    assert recorded_by == "python" or (counts[0] > 1 and max(counts[2:]) <= 1), (
        f"{counts}: the first row of a recording that is written is Python's"
    )


def numbers_that_are_equal(m: Parts, x: torch.Tensor) -> Any:
    """1, 1.0 and True are equal, and make other tensors; so do 0.0 and -0.0."""
    made = []
    for number in (1, 1.0, True, 0.0, -0.0, 0):
        t = torch.full((SIZE,), number)
        if t.dtype.is_floating_point:
            t += m.l(x) * 0
        made.append(t)
    return tuple(made)


def of_own_kinds(m: Parts, x: torch.Tensor) -> Any:
    """What stays real: a leaf that wants a gradient, what is made under a mode, what Python reads."""
    wanted = torch.zeros(SIZE, requires_grad=True)
    read = torch.zeros(2, 3).tolist()
    total = torch.zeros(SIZE, dtype=torch.float64)
    total += m.l(x)
    return wanted + total.float(), read


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize(
    "code", [of_each_kind, numbers_that_are_equal, of_own_kinds], ids=lambda c: c.__name__
)
def test_what_factories_give_is_a_value_once_values_were_written_to_such(code: Any, grad: bool) -> None:
    model = Parts(code, out="list")
    for _ in range(4):
        instances = [torch.randn(SIZE) for _ in range(6)]
        with torch.set_grad_enabled(grad):
            found = model.batched(instances)
            expected = [model(x) for x in instances]
        torch.testing.assert_close(found, expected)
        for a, b in zip(leaves(found), leaves(expected), strict=True):
            assert (a.dtype, a.requires_grad, bool(a.signbit().any())) == (
                b.dtype, b.requires_grad, bool(b.signbit().any()),
            )  # fmt: skip
        if grad:
            assert_same_gradients(model, found, expected)


def assert_same_gradients(model: Parts, found: Any, expected: Any) -> None:
    pairs = [gradients(model, leaves(x)) for x in (found, expected)]
    torch.testing.assert_close(*pairs)


def test_sizes_of_their_own_and_another_default_type() -> None:
    def code(m: Parts, x: torch.Tensor) -> Any:
        total = torch.zeros(x.shape[0], SIZE)
        for i in range(x.shape[0]):
            total[i] += m.l(x[i]).to(total.dtype)
        return total

    model = Parts(code, out="list")
    for default in (torch.float32, torch.float32, torch.float64, torch.float64, torch.float32):
        instances = [torch.randn(n, SIZE, dtype=torch.float32) for n in (1, 3, 2, 3)]
        torch.set_default_dtype(default)
        try:
            found, expected = model.batched(instances), [model(x) for x in instances]
        finally:
            torch.set_default_dtype(torch.float32)
        assert [t.dtype for t in found] == [default] * 4
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("grad", [True, False])
def test_what_factories_give_is_a_value_once_such_were_often_used(grad: bool, recorded_by: str) -> None:
    kinds: list[type] = []

    def code(m: Parts, x: torch.Tensor) -> Any:
        h, whole = torch.zeros(SIZE), torch.tensor(3)
        kinds.append(type(h))
        wanted = torch.zeros(SIZE, requires_grad=True)
        for step in (x, 2 * x):
            h = torch.tanh(m.l(step) + torch.full((SIZE,), 0.5)) * whole + h + wanted
        return h, torch.zeros(SIZE), (h + torch.zeros(SIZE)).detach().add_(1)

    model = Parts(code, out="list")
    for _ in range(4):
        instances = [torch.randn(SIZE) for _ in range(12)]
        with torch.set_grad_enabled(grad):
            found = model.batched(instances)
            last = kinds[-1]
            expected = [model(x) for x in instances]
        torch.testing.assert_close(found, expected)
        if grad:
            assert_same_gradients(model, found, expected)
    assert recorded_by == "python" or last is not torch.Tensor


@pytest.mark.parametrize("grad", [True, False])
def test_what_factories_give_is_often_used_and_becomes_a_value_then(grad: bool) -> None:
    def code(m: Parts, x: torch.Tensor) -> Any:
        rows = torch.zeros(3, SIZE)
        rows[0] = 1
        scale = m.l.bias * 1.5
        scale = scale + (scale * rows).sum(0)
        rows[1] = scale * x
        return rows.sum()

    model = Parts(code)
    for _ in range(3):
        with torch.set_grad_enabled(grad):
            batch = [torch.randn(SIZE) for _ in range(12)]
            torch.testing.assert_close(model.batched(batch), torch.stack([model(x) for x in batch]))


def test_what_python_asks_of_what_factories_give_is_waited_for_once() -> None:
    asks = False

    def code(m: Parts, x: torch.Tensor) -> Any:
        h = torch.zeros(SIZE)
        y = m.l(x) + h
        return y + 1 if asks and h.sum() == 0 else y

    model, phases = Parts(code), []
    for k in range(7):
        asks = k > 2
        instances = [torch.randn(SIZE) for _ in range(10)]
        torch.testing.assert_close(model.batched(instances), torch.stack([model(x) for x in instances]))
        phases.append(fxbatch.explain(model.batched, instances).phases)
    assert phases == [1] * 7


def test_a_factory_whose_tensor_is_gone_gives_real_tensors() -> None:
    """What is written to has taken the place in memory of what a factory made."""
    reals = []

    def code(m: Parts, x: torch.Tensor) -> Any:
        for _ in range(4):
            number = torch.zeros(SIZE)
            reals.append(type(number))
            total = number + 1.0
            del number
            other = torch.randn(SIZE).abs_() + 1.0
            other += m.l(x)
        return total + other * 0

    model = Parts(code, out="list")
    for _ in range(4):
        model.batched([torch.randn(SIZE) for _ in range(6)])
    assert set(reals) == {torch.Tensor}


def what_changes_nothing(m: Parts, x: torch.Tensor) -> Any:
    """`.to`, `.contiguous`, `.float` give the object itself, with its gradient under no_grad too."""
    h = m.l(x)
    total = torch.zeros(SIZE).to("cpu").float().contiguous()
    total += h
    with torch.no_grad():
        again = h.to(h.dtype)
    assert again is h and total.contiguous() is total
    again.mul_(2)
    return total, h, again * total


@pytest.mark.parametrize("grad", [True, False])
def test_what_changes_nothing_gives_the_object_itself(grad: bool) -> None:
    model = Parts(what_changes_nothing, out="list")
    for _ in range(3):
        instances = [torch.randn(SIZE) for _ in range(5)]
        with torch.set_grad_enabled(grad):
            found, expected = model.batched(instances), [model(x) for x in instances]
        torch.testing.assert_close(found, expected)
        if grad:
            assert_same_gradients(model, found, expected)


@pytest.mark.parametrize(
    "write",
    [
        lambda t, best: t.scatter_(0, best, 1.0),
        lambda t, best: t.__setitem__(best, 1.0),
        lambda t, best: t.__setitem__(0, best.float().sum()),
    ],
)
def test_a_variable_of_a_tensor_that_was_written_to(write: Callable[..., object]) -> None:
    """`Variable(one_hot)`, as code before torch 0.4 has it."""

    class OneHot(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 5)

        @fxbatch.autobatch(adaptive=False)
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h, one_hot = self.lin(x), torch.zeros(5)
            write(one_hot, h.argmax().view(1))
            return (torch.autograd.Variable(one_hot) * h).sum()

    check_equal(OneHot(), [torch.randn(4) for _ in range(5)])


@pytest.mark.parametrize(
    "like",
    [
        lambda t, h: t.type_as(h),
        lambda t, h: t.to(h),
        lambda t, h: t.double().to(h),
        lambda t, h: t.view(25)[:5].view_as(h).repeat(5, 1).to(h),
        lambda t, h: t[0].reshape_as(h).expand(5, 5).clone().to(h),
    ],
)
def test_a_real_tensor_of_the_type_of_a_value_stays_real(like: Callable[..., torch.Tensor]) -> None:
    """`torch.zeros(n, n).type_as(h)`, which is written to."""

    class Mask(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 5)

        @fxbatch.autobatch(adaptive=False)
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.lin(x)
            mask = like(torch.zeros(5, 5), h)
            for i in range(5):
                mask[i, : i + 1] = 1
            return (mask @ h).sum()

    model = Mask()
    for _ in range(2):
        check_equal(model, [torch.randn(4) for _ in range(5)])


@pytest.mark.parametrize("asked", [lambda t: t.data, lambda t: t.real, lambda t: t.data[0]])
@pytest.mark.parametrize("write", [lambda t, h: t.__setitem__(0, h[0]), lambda t, h: t.add_(h)])
def test_what_is_asked_of_a_tensor_that_was_written_to(
    asked: Callable[[torch.Tensor], Any], write: Callable[[torch.Tensor, torch.Tensor], object]
) -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        @fxbatch.autobatch(adaptive=False)
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h, count = self.lin(x), x.new_zeros(4, 4)[1]
            write(count, h)
            return (asked(count) * h).sum()

    check_equal(Counter(), [torch.randn(4) for _ in range(5)])


@pytest.mark.parametrize(
    "write",
    [
        lambda m, t, i: t.__setitem__(0, m.lin.bias),
        lambda m, t, i: t.__setitem__((0, slice(2, 6)), m.table.weight[i]),
        lambda m, t, i: t.copy_(m.lin.bias),
        lambda m, t, i: t.add_(m.lin.bias),
        lambda m, t, i: t[0].add_(m.lin.bias),
    ],
)
def test_a_parameter_that_is_written_to_a_real_tensor(write: Callable[..., object]) -> None:
    class Written(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.table = nn.Linear(8, 8), nn.Embedding(5, 4)

        @fxbatch.autobatch(adaptive=False)
        def forward(self, i: int) -> torch.Tensor:
            x = torch.zeros(1 + i % 3, 8, dtype=self.lin.bias.dtype)
            write(self, x, i)
            return self.lin(x).sum()

    model = Written()
    for _ in range(2):
        check_equal(model, list(range(5)))


def _by_colons(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a = torch.zeros(1, len(x), 4, dtype=x.dtype)
    a[:, 0, :] = m.lin(x[:1])
    for t in range(1, len(x)):
        a[:, t, :] = torch.tanh(m.lin(a[:, t - 1, :].clone())) + x[t]
    return a.sum(), a[:, len(x) - 1], a[0, -1]


def _and_added_to(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a = torch.zeros(1, len(x), 4, dtype=x.dtype)
    a[:, 0] = m.lin(x[0])
    for t in range(1, len(x)):
        a[:, t] = torch.tanh(m.lin(a[:, t - 1].clone()))
        a[:, t] += x[t]
    return a.sum(), a[..., 1], a[:, -1, :].sum()


def _rows_first(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a = torch.zeros(len(x), 1, 4, dtype=x.dtype)
    a[0, :] = m.lin(x[:1])
    for t in range(1, len(x)):
        a[t, :, :] = torch.tanh(m.lin(a[t - 1, ...].clone())) * x[t]
        a[t, 0] *= 2
    return a.sum(), a[-1, :], a[:, 0].sum()


def _of_numbers(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a = torch.zeros(1, 1, len(x), dtype=x.dtype)
    a[:, :, 0] = m.lin(x[0]).sum()
    for t in range(1, len(x)):
        a[:, :, t] = a[:, :, t - 1] * 2 + m.lin(x[t]).sum()
    return a.sum(), a[:, :, -1], a[0, 0]


def _with_views(m: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    a = torch.ones(1, len(x), 4, dtype=x.dtype)
    a[:, 0] = m.lin(x[:1])
    v = a[:, 1]
    a[:, 1, :] = a[:, 0, :] + 1
    v, w = v * 2, a[:, 1, :]
    a[:, 1, :] = m.lin(w.clone())
    w = w + v
    a[:, len(x) - 1, 1:3] = w[:, 1:3]
    return a.sum(), w.sum(), v.sum()


@pytest.mark.parametrize("write", [_by_colons, _and_added_to, _rows_first, _of_numbers, _with_views])
@pytest.mark.parametrize("rows", [(3, 3, 3), (2, 4, 3)])
@pytest.mark.parametrize("grad", [True, False])
def test_rows_behind_dimensions_of_one(
    write: Callable[[Any, torch.Tensor], tuple[torch.Tensor, ...]], rows: Sequence[int], grad: bool
) -> None:
    """`outputs[:, t, :] = h`, as code for batches writes it that runs with one instance."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        @fxbatch.autobatch(adaptive=False, out="list")
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            return write(self, x)

    model = Writes()
    for _ in range(2):
        with torch.set_grad_enabled(grad):
            check_equal(model, [torch.randn(n, 4) for n in rows])


def test_rows_behind_dimensions_of_one_are_one_call_for_all_lengths() -> None:
    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a, h = torch.zeros(1, len(x), 4), torch.zeros(1, 4)
            for t in range(len(x)):
                h = self.cell(x[t : t + 1], h)
                a[:, t, :] = h if t == 0 else h + a[:, t - 1, :]
            return a[:, len(x) - 1, :].sum()

    Writes.forward = fxbatch.autobatch(Writes.forward, adaptive=False)  # type: ignore[method-assign]
    text = str(fxbatch.explain(Writes(), [torch.randn(n, 4) for n in (3, 5, 7)]))
    assert "index_copy" not in text and "setitem" not in text


@pytest.mark.parametrize("name", ["table", "zeros"])
def test_rows_of_what_all_share_that_values_choose_are_not_written_to(name: str) -> None:
    def code(m: Parts, x: torch.Tensor) -> Any:
        i, y = m.l(x).argmax() % 3, m.l(x).sum()
        with torch.no_grad():
            getattr(m, name)[i].add_(1.0)
        return y * getattr(m, name)[i].sum()

    refused(code, "a row of a parameter or buffer, which all instances share")


class Counting(nn.Module):
    """A whole forward that could be packed, but for a count in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(SIZE, SIZE)
        self.register_buffer("count", torch.zeros(8))

    @fxbatch.autobatch
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best = self.l(x).sum(1).argmax()
        self.count[best].add_(1.0)
        return self.l(x).sum() * self.count[best].sum()


class Tallying(nn.Module):
    """A count that is no buffer, across a wait."""

    def __init__(self) -> None:
        super().__init__()
        self.l, self.count = nn.Linear(SIZE, SIZE), torch.zeros(SIZE)

    @fxbatch.autobatch
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best = self.l(x).argmax()
        self.count[best].add_(1.0)
        if self.l(x).sum() > 0:
            self.count[best].mul_(2.0)
        return self.l(x).sum() * self.count.sum()


@pytest.mark.usefixtures("as_users_have_it")
@pytest.mark.parametrize(
    ("kind", "shape"),
    [(Counting, lambda n: (3 + n % 4, SIZE)), (Tallying, lambda n: (SIZE,))],
    ids=["buffer", "plain tensor, seen by the scouts"],
)
def test_counts_of_instances_are_what_the_loop_counts(kind: Any, shape: Any) -> None:
    torch.manual_seed(0)
    model = kind()
    alone = copy.deepcopy(model)
    for _ in range(3):
        xs = [torch.randn(shape(n)) for n in range(8)]
        found = model(xs)
        with fxbatch.disabled():
            torch.testing.assert_close(found, alone(xs))
        torch.testing.assert_close(model.count, alone.count)
