"""Numbers of integer constants: read once a trace, again where one was written to, and never of what has none."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch

import fxbatch
from fxbatch.trace import constants, module_state, traces
from fxbatch.trace.constants import IntegerColumn, RowColumn, read_integers, sources_of
from fxbatch.trace.state import _fast
from fxbatch.trace.table import SignatureTable
from tests import models as M
from tests.oracle import check_equal

TYPES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)


@pytest.mark.parametrize("dtype", TYPES)
def test_numbers_are_read_at_once(dtype: torch.dtype) -> None:
    tensors = [torch.tensor(k % 3, dtype=dtype) for k in range(7)]
    tensors += [torch.arange(5).to(dtype)[1], torch.ones(2, 2, dtype=dtype).t()[0, 1]]
    tensors[2].zero_()
    found = read_integers(tensors, dtype)
    assert found is not None and found.tolist() == [t.item() for t in tensors]


def test_rows_of_tensors_are_a_column() -> None:
    table, other, whole = torch.randn(5, 3, requires_grad=True), torch.randn(2, 3), torch.randn(3)
    items = [table[4], other[1], table[0], whole, table[4], other[0]]
    column = RowColumn([table, other, whole], np.array([0, 1, 0, 2, 0, 1]), np.array([4, 1, 0, -1, 4, 0]))
    for found, expected in zip(column, items, strict=True):
        assert torch.equal(found, expected) and found.requires_grad == expected.requires_grad
    assert torch.equal(torch.stack(column[1:4]), torch.stack(items[1:4]))
    assert len(set(column.keys.tolist())) == 5 and column.keys[0] == column.keys[4]
    for where in (slice(0, 6), slice(2, 3), np.array([5, 3, 1, 0, 2]), np.array([0, 4])):
        chosen = np.arange(6)[where]
        out = torch.full((len(chosen), 3), torch.nan)
        with torch.no_grad():
            column.put(where, out)
        assert torch.equal(out, torch.stack([items[i] for i in chosen.tolist()]))
        taken = column.take(chosen)
        assert torch.equal(torch.stack(list(taken)), out)
        assert len(taken.sources) == len(set(column.source[chosen].tolist()))
    assert list(map(id, sources_of(column))) == list(map(id, (table, other, whole)))


def test_what_has_no_number_to_read() -> None:
    with torch.inference_mode():
        without_version = torch.tensor(3)
    own = torch.tensor(1).as_subclass(type("Own", (torch.Tensor,), {}))
    assert read_integers([torch.tensor(0.5)], torch.float32) is None  # may have a lazy sign
    for other in (torch.tensor(1, device="meta"), own):
        assert read_integers([torch.tensor(1), other], torch.int64) is None
    assert IntegerColumn.of([torch.tensor(1), without_version], torch.int64) is None
    found = IntegerColumn.of([torch.tensor(1), without_version], torch.int64, watched=False)
    assert found is not None and found.numbers.tolist() == [1, 3] and not found.written_to()


class WordsOfOneElement(torch.nn.Module):
    """`torch.LongTensor([word])`, as old code has it, and a mask, of one element each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = torch.nn.Embedding(20, 4), torch.nn.Linear(4, 3)

    @fxbatch.autobatch(adaptive=False)
    def forward(self, words: list[int], flags: list[bool], write: bool) -> torch.Tensor:
        loss: Any = 0.0
        for k, (word, flag) in enumerate(zip(words, flags, strict=True)):
            index, label = torch.LongTensor([word]), torch.tensor([[word % 3]])
            h = torch.tanh(self.embed(index)) * torch.tensor([flag])
            if write and k == 1:
                index.fill_(0)  # what was recorded has read it
            loss = loss + torch.nn.functional.cross_entropy(self.out(h), label[0]) + h.sum()
        return loss  # type: ignore[no-any-return]


def test_integers_of_one_element_are_read_as_those_without_dimensions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = WordsOfOneElement()
    read: list[int] = []
    plain = IntegerColumn.met
    monkeypatch.setattr(IntegerColumn, "met", lambda t, n: (read.append(t[0].dim()), plain(t, n))[1])
    for step in range(3):
        words = [[(3 * i + k * step) % 20 for k in range(1 + i)] for i in range(5)]
        flags = [[(k + i) % 2 == 0 for k in range(1 + i)] for i in range(5)]
        check_equal(model, words, flags, [False] * 5)
        writes = [bool(i % 2) for i in range(5)]
        with torch.no_grad():
            batched = model(words, flags, writes)
            with fxbatch.disabled():
                torch.testing.assert_close(batched, model(words, flags, writes))
    if _fast is not None:
        assert 1 in read


def test_rows_and_columns_of_one_element() -> None:
    tensors = [torch.tensor([k]) for k in range(5)] + [torch.tensor([7])]
    assert read_integers(tensors, torch.int64).tolist() == [0, 1, 2, 3, 4, 7]  # type: ignore[union-attr]
    assert read_integers([torch.tensor([1, 2])], torch.int64) is None
    column = IntegerColumn.of_rows(
        [torch.tensor([[4], [5]]), torch.tensor([[6]])], [np.array([1]), np.array([0])]
    )
    assert column.numbers.tolist() == [5, 6] and [t.tolist() for t in column] == [[5], [6]]
    met = IntegerColumn.met(tensors[:2], np.array([0, 1]))
    tensors[1].fill_(9)
    assert [t.tolist() for t in met] == [[0], [1]]


def test_a_column_stands_for_its_tensors() -> None:
    tensors = [torch.tensor(k) for k in range(6)]
    a, b = IntegerColumn.of(tensors[:4], torch.int64), IntegerColumn.of(tensors[4:], torch.int64)
    assert a is not None and b is not None
    joined = IntegerColumn.joined([a, b])
    chosen = joined.take(np.array([5, 0, 3])).take(np.array([0, 2]))
    assert chosen.numbers.tolist() == [5, 3] and len(chosen) == 2
    assert chosen[0] is tensors[5] and chosen[1] is tensors[3] and chosen[-1] is tensors[3]
    assert all(x is y for x, y in zip(chosen, (tensors[5], tensors[3]), strict=True))
    assert all(x is y for x, y in zip(joined[1:5], tensors[1:5], strict=True))
    assert not joined.written_to()
    tensors[5].add_(1)
    assert joined.written_to() and b.written_to() and not a.written_to()


def _trees() -> tuple[Any, list[Any], Any]:
    torch.manual_seed(0)
    model, trees = M.TreeLSTM(), M.trees(1, [1, 4, 7, 3])
    return model, trees, fxbatch.TracedDataset(model, trees)


def _words(tree: Any) -> list[torch.Tensor]:
    own = [] if tree.word is None else [tree.word]
    return own + [word for child in tree.children for word in _words(child)]


def test_a_word_that_is_written_to_is_read_again() -> None:
    model, trees, data = _trees()
    batch = [data[i] for i in range(4)]
    before = model(batch)
    for word in _words(trees[1]):
        word.copy_((word + 1) % 5)
    after = model(batch)
    assert not torch.equal(before[1], after[1])
    torch.testing.assert_close(after, model(trees))
    torch.testing.assert_close(model(pickle.loads(pickle.dumps(batch))), model(trees))


def test_a_planned_minibatch_with_a_word_that_is_written_to_is_planned_again() -> None:
    model, trees, data = _trees()
    (ready,) = fxbatch.prefetch(model, [[data[i] for i in range(4)]])
    assert not ready.stale()
    _words(trees[2])[0].copy_(torch.tensor(4))
    assert ready.stale()
    torch.testing.assert_close(model(ready), model(trees))


def test_merging_again_reads_and_finds_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, data = _trees()
    batch = [data[i] for i in range(4)]
    expected = model(batch)

    def refuse(*_: object) -> None:
        raise AssertionError("done before")

    monkeypatch.setattr(constants, "read_integers", refuse)
    monkeypatch.setattr(traces, "find_again", refuse)
    monkeypatch.setattr(module_state, "fingerprint", refuse)
    torch.testing.assert_close(model(batch), expected)


def test_a_model_is_known_until_something_changes() -> None:
    model, table = M.TreeLSTM(), SignatureTable()
    known = module_state.known_model(table, model)
    assert module_state.known_model(table, model) is known
    model.eval()
    other = module_state.known_model(table, model)
    assert other is not known and other.fingerprint != known.fingerprint
    model.to(torch.float64)
    assert module_state.known_model(table, model).fingerprint != other.fingerprint
    known = module_state.known_model(table, model)
    model.register_buffer("more", torch.ones(2))
    assert len(module_state.known_model(table, model).fingerprint) == len(known.fingerprint) + 1
    assert not len(module_state.known_model(SignatureTable(), model).ids)


def test_a_module_that_lists_its_parts_itself_is_looked_at_each_time() -> None:
    class Own(torch.nn.Module):
        def named_modules(self, *args: Any, **kwargs: Any) -> Any:
            return super().named_modules(*args, **kwargs)

    model, table = Own(), SignatureTable()
    assert module_state.known_model(table, model) is not module_state.known_model(table, model)


class _Counts(torch.nn.Module):
    """Looks up a number, writes to it, and looks it up again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(9, 4)

    def forward(self, number: torch.Tensor, twice: torch.Tensor) -> Any:
        before = self.embed(number) * twice
        number.add_(1)
        return before + self.embed(number).cumsum(0)


@pytest.mark.skipif(_fast is None, reason="what integers held is read by C")
@pytest.mark.parametrize("options", [{}, {"backward": "autograd"}, {"deduplicate": True}, {"native": False}])
def test_an_integer_is_what_it_was_when_it_was_met(options: dict[str, Any]) -> None:
    model = _Counts()
    batched = fxbatch.autobatch(adaptive=False, **options)(model.forward)
    twice = [torch.tensor(k % 2 == 0) for k in range(6)]
    for _ in range(3):  # from the second time on C meets them
        given = [[torch.tensor(k % 4) for k in range(6)] for _ in range(2)]
        expected = torch.stack([model(*one) for one in zip(given[0], twice, strict=True)])
        torch.testing.assert_close(batched(given[1], twice), expected)
        assert given[1] == given[0]


def test_a_column_of_what_was_met_gives_tensors_with_its_numbers() -> None:
    tensors = [torch.tensor(k) for k in range(4)]
    column = IntegerColumn.met(tensors, np.arange(4))
    assert column[1] is tensors[1]
    column = IntegerColumn.met(tensors, np.arange(4)).take(np.array([3, 1]))
    tensors[3].add_(1)
    assert [t.item() for t in column] == [3, 1] == [column[i].item() for i in range(2)]
    assert not column.written_to()
