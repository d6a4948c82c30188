"""Views and writes in place: what a recorded forward gives is what its loop gives, numbers, flags and gradients.

In float64 throughout, also for tensors that a forward makes, so that hardly anything is left for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Variable

import fxbatch
from fxbatch.torch_private import tree_leaves


class Model(nn.Module):
    """A form of writing `forward`; an instance is `[5, 4]`."""

    def __init__(self, form: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.one, self.two, self.embed = nn.Linear(4, 4), nn.Linear(4, 4), nn.Embedding(9, 4)
        self.form = form

    @fxbatch.autobatch(adaptive=False, out="list")
    def forward(self, x: Tensor) -> Any:
        return self.form(self, x)


@pytest.fixture(autouse=True)
def in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


# -- buffers ---------------------------------------------------------------------------------------------


def fills_a_buffer(m: Any, x: Tensor) -> Any:
    buffer = torch.zeros(len(x), 4)
    for i, row in enumerate(x):
        buffer[i] = torch.tanh(m.one(row))
    return buffer.sum(0) + buffer[0]


def fills_a_buffer_that_is_read(m: Any, x: Tensor) -> Any:
    buffer = torch.zeros(len(x), 4)
    for i, row in enumerate(x):
        buffer[i] = torch.tanh(m.one(row) + buffer[i - 1])
    return buffer, buffer[-1]


def fills_negative_rows(m: Any, x: Tensor) -> Any:
    buffer = x.new_zeros(3, 4)
    buffer[-1], buffer[0] = m.one(x[0]), m.two(x[1])
    return buffer * 2, buffer[2]


def overwrites_a_row(m: Any, x: Tensor) -> Any:
    buffer = torch.zeros(2, 4)
    buffer[0] = m.one(x[0])
    first = buffer[0] * 1
    buffer[0] = m.two(x[1])
    return first, buffer


def adds_to_rows(m: Any, x: Tensor) -> Any:
    buffer = torch.zeros(4, 4)
    for i, row in enumerate(x):
        buffer[i % 4] += torch.tanh(m.one(row))
    return buffer


def adds_to_rows_by_turns(m: Any, x: Tensor) -> Any:
    buffer = torch.zeros(3, 4)
    for i in (0, 1, 2, 1):
        buffer[i] += m.one(x[i])
    return buffer


def adds_to_rows_of_a_value(m: Any, x: Tensor) -> Any:
    buffer = m.two(x) * 1
    for i in range(len(x)):
        buffer[i] += torch.tanh(m.one(buffer[i - 1] * 1))
    return buffer, buffer[-1]


def sets_several_at_once(m: Any, x: Tensor) -> Any:
    z = torch.zeros(2, 4)
    z[0, range(4)] = m.one(x[0])
    return z


def writes_columns(m: Any, x: Tensor) -> Any:
    y = m.one(x) * 1
    y[:, 1] += 1
    y[0, 2] = m.two(x[0])[3]
    column = y[:, 1]
    y[1] = 0
    y[-1] = m.two(x[0])
    return y * 1, column * 2


def writes_a_block(m: Any, x: Tensor) -> Any:
    y = torch.zeros(5, 4)
    y[1:3] = m.one(x[1:3])
    y[3:].copy_(m.two(x[3:]))
    return y


def writes_where_a_mask_is(m: Any, x: Tensor) -> Any:
    y = m.one(x) * 1
    y[x > 0] = 0.0
    return y


def accumulates_by_index(m: Any, x: Tensor) -> Any:
    out = torch.zeros(3, 4)
    out.index_add_(0, torch.tensor([0, 2, 0, 1, 2]), m.one(x))
    return out


# -- totals ----------------------------------------------------------------------------------------------


def adds_to_a_total(m: Any, x: Tensor) -> Any:
    total = torch.zeros(())
    for row in x:
        total += m.one(row).sum()
    total *= 2
    total -= 1
    return total


def total_that_is_seen_before(m: Any, x: Tensor) -> Any:
    total = torch.zeros(4)
    before = total + 1
    total += m.one(x[0])
    between = total * 1
    total += m.two(x[1])
    return before, between, total


def two_names_of_a_total(m: Any, x: Tensor) -> Any:
    total = torch.zeros(4)
    same = total
    total += m.one(x[0])
    return same * 1, same is total


# -- chains of views ---------------------------------------------------------------------------------------


def writes_through_a_chain(m: Any, x: Tensor) -> Any:
    y = m.one(x) * 1
    lower = y[1:]
    part = lower[:2]
    other = y[1]
    part.mul_(0)
    return y.sum(0) + other + lower.sum(0) + part.sum()


def writes_below_a_chain(m: Any, x: Tensor) -> Any:
    y = m.one(x) * 1
    part = y[1:][:2][0]
    y += 1
    y[1] = m.two(x[0])
    return part * 1, y


def siblings(m: Any, x: Tensor) -> Any:
    h = m.one(x[0]) * 1
    left, right = h[:3], h[1:]
    left += m.two(x[1])[:3]
    right *= 2
    return h, left * 1, right * 1


def parts_of_a_chunk(m: Any, x: Tensor) -> Any:
    a, b = m.one(x[0]).mul(1).view(2, 2).unbind(0)
    y = torch.cat([a * 1, b * 1])
    c = y.view(2, 2)
    c[0] = b
    return y, c.t() * 1


def through_a_transpose(m: Any, x: Tensor) -> Any:
    y = m.one(x) * 1
    t = y.t()
    t[0] += 1
    t[1] = x.new_ones(5)
    return y, t * 1


def through_a_view_of_another_shape(m: Any, x: Tensor) -> Any:
    h = m.one(x[0]) * 1
    square = h.view(2, 2)
    square[1, 0] = m.two(x[1])[2]
    square.unsqueeze(0)[0, 0].add_(1)
    return h, square * 1


def row_and_its_source(m: Any, x: Tensor) -> Any:
    y = m.one(x) * 1
    r = y[0]
    r += 1
    s = y[0]
    y[0] = m.two(x[1])
    return r * 1, s * 1, y * 1


def rows_of_an_iteration(m: Any, x: Tensor) -> Any:
    y = m.one(x) * 1
    for i in range(len(y)):
        row = y[i]
        row += i
    return y


def swaps_rows(m: Any, x: Tensor) -> Any:
    y = m.one(x) * 1
    y[0], y[1] = y[1].clone(), y[0].clone()
    return y


def expanded_views_are_read(m: Any, x: Tensor) -> Any:
    h = m.one(x[0]) * 1
    wide = h.expand(3, 4)
    h += 1
    return wide * 1, h


# -- detached --------------------------------------------------------------------------------------------


def through_detach(m: Any, x: Tensor) -> Any:
    h = m.one(x[0]) * 2
    d = h.detach()
    d.mul_(3)
    return h * 1, d.requires_grad, h.requires_grad, d * m.two(x[0])


def through_data(m: Any, x: Tensor) -> Any:
    h = m.one(x[0]) * 2
    h.data.add_(1)
    return h * 1


def detached_row(m: Any, x: Tensor) -> Any:
    y = m.one(x) * 1
    y.detach()[1].zero_()
    return y * 1, y.requires_grad


def views_of_detached(m: Any, x: Tensor) -> Any:
    y = m.one(x) * 1
    d = y.detach()[1:]
    y.mul_(2)
    return d * 1, d.requires_grad, y


def without_gradients(m: Any, x: Tensor) -> Any:
    h = m.one(x[0]) * 2
    with torch.no_grad():
        h.mul_(3)
    return h.sum() + m.two(x[0])


def view_without_gradients(m: Any, x: Tensor) -> Any:
    y = m.one(x) * 1
    with torch.no_grad():
        row = y[0] * 1
        seen = row.requires_grad
    return row, seen, y


def detached_in_place(m: Any, x: Tensor) -> Any:
    h = m.one(x[0]) * 1  # a linear layer's result is a view where its input is a vector
    h.detach_()
    return h * 2 + m.one(x[0]), h.requires_grad


def buffer_of_detached(m: Any, x: Tensor) -> Any:
    buffer = torch.zeros(2, 4)
    buffer[0] = m.one(x[0]).detach()
    flag = buffer.requires_grad
    buffer[1] = m.two(x[1])
    return buffer, flag, buffer.requires_grad, buffer[0].requires_grad


# -- real views ------------------------------------------------------------------------------------------


def row_of_a_real_buffer(m: Any, x: Tensor) -> Any:
    buffer = torch.zeros(3, 4)
    row = buffer[1]
    row += m.one(x[0])
    return row * 1, buffer.sum(0)


def slice_of_a_real_buffer(m: Any, x: Tensor) -> Any:
    buffer = torch.ones(5, 4)
    buffer[1:3] *= m.one(x[0])
    return buffer


def real_rows_in_order(m: Any, x: Tensor) -> Any:
    buffer = x.clone()
    for i in range(1, 3):
        buffer[i] = m.one(buffer[i - 1] * 1)  # without, the loop's own graph holds what is written to
    return buffer


# -- before torch 0.4 ------------------------------------------------------------------------------------


def read_without_gradients_first(m: Any, x: Tensor) -> Any:
    few, all_rows = torch.zeros(5, 4), torch.zeros(2, 4)
    few[1] = m.one(x[0])
    all_rows[0], all_rows[1] = m.one(x[1]), m.two(x[2])
    with torch.no_grad():
        mean, total = few.mean(), all_rows.mean()
    return few * 2, all_rows.sum() + mean * total, mean, total


def stale_view_read_without_gradients(m: Any, x: Tensor) -> Any:
    y = m.one(x) * 1
    part = y[1:3]
    y.mul_(2)
    with torch.no_grad():
        mean = part.mean()
    return part.sum() + mean, mean


def new_tensors_of_a_size(m: Any, x: Tensor) -> Any:
    y = m.one(x[:2])
    return (
        y.data.new(y.size()).zero_() + y,
        y.new(y.size()).fill_(2.0),
        y.new(2, 3).zero_(),
        y.new((1.0, 3.0)),
    )


def new_tensors(m: Any, x: Tensor) -> Any:
    h = m.one(x[0])
    z = h.detach().new(1, 4).fill_(0.0)
    other = h.data.new(*h.size()).zero_()
    third = h.data.new(h.size()).zero_()
    return h + z[0] + other + third, h.new((1, 3)), h.new(h.size(0), 2).fill_(1)


def variables(m: Any, x: Tensor) -> Any:
    h = Variable(m.one(Variable(x[0])))
    z = Variable(torch.zeros(4)) + h
    return z + torch.zeros(4).requires_grad_()


def last_symbol_in_a_long_tensor(m: Any, x: Tensor) -> Any:
    h, last, out = m.one(x[0]), torch.LongTensor([0]), []
    for k in range(3):
        out.append(m.embed(last)[0].detach() + h)  # the loop's gradient would be of the last symbol only
        last.data[0] = k + 1
    return torch.stack(out)


def best_by_data(m: Any, x: Tensor) -> Any:
    h = m.one(x[0])
    _, best = torch.max(h.data, 0)
    return h * (best * 0 + 1), m.embed(best)


def by_numpy(m: Any, x: Tensor) -> Any:
    h = m.one(x[0])
    return h * float(h.data.numpy()[0] > 0) + h.detach().cpu().numpy().sum()


def hidden_of_zeros(m: Any, x: Tensor) -> Any:
    h = Variable(x.data.new(4).zero_())
    for row in x:
        h = torch.tanh(m.one(row) + m.two(h))
    return h


# -- indices ---------------------------------------------------------------------------------------------


def ranges_and_lists(m: Any, x: Tensor) -> Any:
    h = m.one(x[0]).view(2, 2)
    return h[range(2)], h[[0, 1]], h[0, range(2)]


def ends_at_a_value(m: Any, x: Tensor) -> Any:
    h = m.one(x[0])
    n = h.argmax() * 0 + 2
    return x[:n], h[:n]


# -- rows of buffers, again and again ------------------------------------------------------------------------


def adds_and_reads_rows_by_turns(m: Any, x: Tensor) -> Any:
    buffer, held = torch.zeros(3, 4), []
    for i, row in enumerate(x):
        part = buffer[i % 3]
        part += m.one(row)
        part.mul_(0.5)
        held.append(part)
        buffer[(i + 1) % 3] += part
        held.append(buffer[i % 3] * 2)
    return buffer, held


def stores_one_row_in_two_places(m: Any, x: Tensor) -> Any:
    buffer = torch.zeros(3, 4)
    for row in x:
        h = m.one(row)
        buffer[0] = h
        buffer[1] = buffer[0]
        buffer[2] = buffer[1] + h
        buffer[0] += 1
        buffer[1] = h + buffer[2]
    return buffer, buffer[1]


def stores_a_row_of_itself(m: Any, x: Tensor) -> Any:
    buffer = m.one(x) * 1
    for i in range(4):
        buffer[i] = buffer[i]
        buffer[i] = buffer[i + 1]
        buffer[-1] = buffer[i] + m.two(x[i])
    return buffer


def view_that_is_older_than_a_write(m: Any, x: Tensor) -> Any:
    buffer, results = m.two(x), []
    for i, row in enumerate(x):
        older = buffer[i]
        buffer[i] = m.one(row)
        results.append(older * 2)
        older += 1
        results.append(buffer[i] - older)
    return results, buffer


def rows_with_and_without_gradients(m: Any, x: Tensor) -> Any:
    buffer, flags = torch.zeros(5, 4), []
    for i, row in enumerate(x):
        buffer[i] = m.one(row) if i % 2 else m.one(row).detach()
        flags.append(buffer[i].requires_grad)
        buffer[1] = m.one(row).detach()
        flags.append(buffer.requires_grad)
    return buffer * 1, flags


def rows_within_no_grad(m: Any, x: Tensor) -> Any:
    buffer = torch.zeros(5, 4)
    for i, row in enumerate(x):
        buffer[i] = m.one(row)
        with torch.no_grad():
            buffer[i] *= 2
            buffer[i - 1] += m.two(row)
    return buffer * 1


def rows_of_rows(m: Any, x: Tensor) -> Any:
    buffer = m.two(x[0]).expand(2, 3, 4).clone()
    for i, row in enumerate(x):
        buffer[i % 2][i % 3] += m.one(row)
        buffer[1] = buffer[0] * 2
        buffer[0][1] = m.two(row)
    return buffer


def rows_of_other_types(m: Any, x: Tensor) -> Any:
    buffer, whole = torch.zeros(5, 4), torch.zeros(5, dtype=torch.int64)
    for i, row in enumerate(x):
        buffer[i] = m.one(row)[0]  # broadcast
        buffer[i] = m.one(row).float()
        whole[i] = m.one(row).argmax()
        whole[i] += 2
    return buffer, whole


def rows_beyond_the_end(m: Any, x: Tensor) -> Any:
    buffer = torch.zeros(2, 4)
    for row in x:
        buffer[-1] = m.one(row)
        buffer[-2] += buffer[-1]
    try:
        buffer[2] = m.one(x[0])
    except IndexError:
        return buffer
    return None


def numbers_of_values_in_new_tensors(m: Any, x: Tensor) -> Any:
    h = m.one(x[0])
    a, b = h.detach()[:2]
    best = h.new_tensor([h.argmax(), 3], dtype=torch.long)
    return h.new([a, b]), h.new_tensor([b, 1.0]), best, h.new(m.one(x[1]))


def length_of_a_number(m: Any, x: Tensor) -> Any:
    h = m.one(x[0]).sum()
    try:
        return h * len(h)
    except TypeError:
        return h


FORMS: tuple[Callable[[Any, Tensor], Any], ...] = (
    fills_a_buffer, fills_a_buffer_that_is_read, fills_negative_rows, overwrites_a_row, adds_to_rows,
    adds_to_rows_by_turns, adds_to_rows_of_a_value, sets_several_at_once, writes_columns, writes_a_block,
    writes_where_a_mask_is, accumulates_by_index, adds_to_a_total, total_that_is_seen_before,
    two_names_of_a_total, writes_through_a_chain, writes_below_a_chain, siblings, parts_of_a_chunk,
    through_a_transpose, through_a_view_of_another_shape, row_and_its_source, rows_of_an_iteration, swaps_rows,
    expanded_views_are_read, through_detach, through_data, detached_row, views_of_detached, without_gradients,
    view_without_gradients, detached_in_place, buffer_of_detached, row_of_a_real_buffer, slice_of_a_real_buffer,
    real_rows_in_order, read_without_gradients_first, stale_view_read_without_gradients, new_tensors_of_a_size,
    new_tensors, variables, last_symbol_in_a_long_tensor, best_by_data,
    by_numpy, hidden_of_zeros, ranges_and_lists, ends_at_a_value,
    adds_and_reads_rows_by_turns, stores_one_row_in_two_places, stores_a_row_of_itself,
    view_that_is_older_than_a_write, rows_with_and_without_gradients, rows_within_no_grad, rows_of_rows,
    rows_of_other_types, rows_beyond_the_end,
    numbers_of_values_in_new_tensors, length_of_a_number,
)  # fmt: skip
UNDEFINED = {new_tensors: 1}  # which result has no defined content, only a type


# Each form with and without gradients, alone and among others; all four with --slow.
HOWS = [
    pytest.param(f, grad, n, marks=[] if (n == 4) is (grad is (i % 2 == 0)) else pytest.mark.slow)
    for i, f in enumerate(FORMS)
    for grad in (True, False)
    for n in (1, 4)
]


@pytest.mark.parametrize(("form", "grad", "instances"), HOWS)
def test_form_gives_what_its_loop_gives(
    form: Callable[[Any, Tensor], Any], grad: bool, instances: int
) -> None:
    torch.manual_seed(1)
    model = Model(form)
    for _ in range(3):  # the first minibatch builds, the second finds all calls, the third all lists
        batch = [torch.randn(5, 4) for _ in range(instances)]
        with torch.set_grad_enabled(grad):
            results = model(batch)
            with fxbatch.disabled():
                expected = model(batch)
        _compare(results, expected, undefined=UNDEFINED.get(form))
        if grad:
            gradients = _gradients(model, results)
            _compare([gradients], [_gradients(model, expected)], undefined=None)


def _compare(results: list[Any], expected: list[Any], *, undefined: int | None) -> None:
    for result, other in zip(results, expected, strict=True):
        for k, (a, b) in enumerate(zip(tree_leaves(result), tree_leaves(other), strict=True)):
            if not isinstance(b, Tensor):
                assert a == b, (k, a, b)
                continue
            assert (a.shape, a.dtype, a.requires_grad) == (b.shape, b.dtype, b.requires_grad), k
            if k != undefined:
                torch.testing.assert_close(a.detach(), b.detach(), rtol=1e-10, atol=1e-12)


def _gradients(model: Model, results: list[Any]) -> list[Any]:
    tensors = [t for t in tree_leaves(results) if isinstance(t, Tensor) and t.requires_grad]
    parameters = list(model.parameters())
    loss: Any = sum(t.square().sum() for t in tensors)
    return list(torch.autograd.grad(loss, parameters, allow_unused=True)) if tensors else []


def test_the_comparison_can_fail() -> None:
    t = torch.ones(2)
    for other in (t + 1e-8, t.requires_grad_(True).clone(), torch.ones(3)):
        with pytest.raises(AssertionError):
            _compare([other], [torch.ones(2)], undefined=None)
    with pytest.raises(AssertionError):
        _compare([True], [False], undefined=None)


class WrittenViews(nn.Module):
    """Writes to views of all elements, and to one of a part."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    @fxbatch.autobatch(adaptive=False)
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        y.view(3, 2).transpose(0, 1).masked_fill_(torch.ones(2, 3) > 0, 0.5).unsqueeze(0).mul_(2)
        y.view(2, 3)[:, 1:].mul_(3)
        return y + x


def test_a_view_of_all_elements_is_turned_back() -> None:
    """What is written to it is looked at in the form of what it shows, and not written over a copy of that."""
    model, xs = WrittenViews(), list(torch.randn(4, 6))
    program = fxbatch.compile_minibatch(model, xs).program
    names = [program.signatures[s].name for s in program.sig.tolist()]
    assert names.count("write_through") == len(xs), names  # the part
    with fxbatch.disabled():
        expected = model(xs)
    torch.testing.assert_close(model(xs), expected)
