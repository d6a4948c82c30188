"""A row of a stack is what was stacked: models against the loop, and what is launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxbatch
from fxbatch.ir import signature_columns
from fxbatch.passes import unstack_rows as unstack_rows_module
from fxbatch.passes import unstack_sums
from fxbatch.passes.unstack_rows import unstack_rows
from fxbatch.verify import verify_program
from tests.oracle import assert_launches, check_equal
from tests.passes.reference import results_by_hand
from tests.passes.test_unstack_sums import F4, STACKS, function
from tests.programs import ProgramBuilder

ROW = function(torch.Tensor.__getitem__, [STACKS[3].outputs[0]], F4, (fxbatch.ir.Slot("input", 0), -1))


def test_a_program_before_and_after() -> None:
    made = ProgramBuilder(1)
    values = [made.call("f", made.constant(torch.randn(4), instance=0), instance=0) for _ in range(3)]
    row = made.use(ROW, made.use(STACKS[3], *values, instance=0), instance=0)
    program = made.program(made.call("f", row, instance=0))
    after = unstack_rows(program)
    verify_program(after)
    assert {s.name for s in (after.signatures[i] for i in after.sig)} == {"constant", "f"}
    for a, b in zip(results_by_hand(after, []), results_by_hand(program, []), strict=True):
        torch.testing.assert_close(a, b)
    assert unstack_rows(after) is after


def test_what_is_kept_of_signatures_is_apart_for_functions_of_one_name() -> None:
    signatures = (STACKS[3], ROW)
    columns = signature_columns(signatures)
    assert len(unstack_sums._kinds(columns)) == 0 and unstack_rows_module._kinds(columns)


@pytest.mark.parametrize("told", [True, False])
def test_a_table_that_grows_asks_what_is_new_alone(told: bool) -> None:
    """A minibatch of new shapes cost as much as all signatures that were ever met. told: of which columns it grows, as
    programs do not that have more signatures than the table."""
    asked: list[fxbatch.ir.Signature] = []

    def counted(signature: fxbatch.ir.Signature) -> int:
        asked.append(signature)
        return len(asked)

    every = (*STACKS.values(), ROW)
    every[0].__dict__.pop("_columns", None)
    few = signature_columns(every[:2])
    assert few.each(counted) == (1, 2) == few.each(counted)
    more = signature_columns(every, few if told else None)
    assert more.each(counted) == tuple(range(1, len(every) + 1)) and asked == list(every)
    del every[0].__dict__["_columns"]
    whole = signature_columns(every)
    assert whole is not more and whole.types == more.types
    for name in (
        "arity",
        "width",
        "first_slot",
        "first_output",
        "output_types",
        "constant",
        "random",
        "modes",
    ):
        assert getattr(more, name).tolist() == getattr(whole, name).tolist()


def first_and_last(self: Any, xs: Any) -> Any:
    h = torch.stack([torch.tanh(self.l(x)) for x in xs])
    return self.k(h[0]) + h[-1] * h[1]


def of_rows(self: Any, xs: Any) -> Any:
    h = torch.stack([torch.tanh(self.l(x)) for x in xs])
    again = torch.stack([h[1], h[0]])
    return self.k(again[0]) - again[-1]


def without_gradients(self: Any, xs: Any) -> Any:
    h = [torch.tanh(self.l(x)) for x in xs]
    with torch.no_grad():
        row = torch.stack(h)[0]
    return self.k(row) + h[0]


def as_results(self: Any, xs: Any) -> Any:
    h = torch.stack([torch.tanh(self.l(x)) for x in xs])
    return h[0] + 0, h[1] * 1


def by_a_list(self: Any, xs: Any) -> Any:
    return torch.stack([torch.tanh(self.l(x)) for x in xs])[[1]]


class Model(nn.Module):
    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.l, self.k, self.code = nn.Linear(4, 4), nn.Linear(4, 4), forward

    @fxbatch.autobatch(adaptive=False)
    def forward(self, xs: torch.Tensor) -> Any:
        return self.code(self, xs)


@pytest.mark.parametrize("forward", [first_and_last, of_rows, without_gradients, as_results, by_a_list])
def test_models_equal_the_loop(forward: Callable[..., Any]) -> None:
    check_equal(Model(forward), list(torch.randn(5, 3, 4)))


def test_nothing_is_stacked() -> None:
    names = {
        row.operation for row in fxbatch.explain(Model(first_and_last), list(torch.randn(5, 3, 4))).operations
    }
    assert not any("stack" in name or "getitem" in name or "take_row" in name for name in names)


# -- rows of what treats each row by itself ----------------------------------------------------------------


def words_at_once(self: Any, xs: Any) -> Any:
    e = self.embed(xs)
    return sum(torch.tanh(self.l(e[i])) * e[i - 1] for i in range(len(xs)))


def words_one_by_one(self: Any, xs: Any) -> Any:
    e = [self.embed(x) for x in xs]
    return sum(torch.tanh(self.l(e[i])) * e[i - 1] for i in range(len(xs)))


def in_a_loop(self: Any, xs: Any) -> Any:
    h = self.k.bias * 1
    for row in torch.tanh(self.k(self.embed(xs))):
        h = torch.tanh(self.l(row) + h)
    return h


def functions(self: Any, xs: Any) -> Any:
    e = torch.relu(F.linear(F.embedding(xs, self.embed.weight), self.l.weight, self.l.bias))
    return e[0] + e[-1]


def of_a_sequence(self: Any, xs: Any) -> Any:
    return torch.stack([self.both(xs)[i] for i in range(2)]).sum(0)


def of_a_stack(self: Any, xs: Any) -> Any:
    h = torch.sigmoid(self.k(torch.stack([torch.tanh(self.l(self.embed(x))) for x in xs])))
    return h[0] * h[len(xs) - 1]


def two_readers(self: Any, xs: Any) -> Any:
    e = self.embed(xs)
    k, l = self.k(e), self.l(e)
    return k[0] * l[1] + k[1]


def written(self: Any, xs: Any) -> Any:
    e = torch.relu(self.l(self.embed(xs))).clone()
    e[0] = self.k(e[1].clone())
    return self.l(e[0]) + e[1]


FORMS = [words_at_once, in_a_loop, functions, of_a_sequence, of_a_stack, two_readers, written]


def also_whole(self: Any, xs: Any) -> Any:
    e = self.embed(xs)
    return e[0] + e.sum(0)


def a_result(self: Any, xs: Any) -> Any:
    e = self.embed(xs)
    return self.l(e[0]), e


def across_rows(self: Any, xs: Any) -> Any:
    return torch.softmax(self.embed(xs), 0)[0]


def slices(self: Any, xs: Any) -> Any:
    e = self.embed(xs)
    return self.l(e[0]) + e[1:3].sum(0)


def rows_without_gradients(self: Any, xs: Any) -> Any:
    e = self.embed(xs)
    with torch.no_grad():
        row = e[0]
    return self.l(row) + e[1]


def random_rows(self: Any, xs: Any) -> Any:
    e = F.dropout(self.embed(xs), 1e-9, True)  # of 0.0 it gives its argument itself, and draws nothing
    return self.l(e[0]) + e[1]


def normalised(self: Any, xs: Any) -> Any:
    e = self.norm(self.embed(xs))
    return self.l(e[0]) + e[1]


def rows_by_a_list(self: Any, xs: Any) -> Any:
    return self.embed(torch.tensor(xs.tolist()))[[1]] * torch.arange(2.0)[:, None]


APART = [also_whole, a_result, across_rows, slices, rows_without_gradients, random_rows, normalised]


class Words(nn.Module):
    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.l, self.k, self.code = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 4), forward
        self.both = nn.Sequential(self.embed, self.k, nn.Tanh())
        self.norm = nn.BatchNorm1d(4).eval()

    @fxbatch.autobatch(adaptive=False)
    def forward(self, xs: torch.Tensor) -> Any:
        return self.code(self, xs)


class ListOfWords(Words):
    @fxbatch.autobatch(adaptive=False, out="list")
    def forward(self, xs: torch.Tensor) -> Any:
        return self.code(self, xs)


def sentences(seed: int, fewest: int = 3) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(9, (n,), generator=draw) for n in (fewest, 5, 4, 7, fewest + 1, 6)]


@pytest.mark.parametrize("forward", [*FORMS, *APART, rows_by_a_list])
def test_rows_of_words_equal_the_loop(forward: Callable[..., Any]) -> None:
    model = ListOfWords(forward)
    for seed in range(3):  # packed from the second on
        check_equal(model, sentences(seed))


def operations(model: nn.Module, batch: Any) -> list[str]:
    return [row.signature for row in fxbatch.explain(model, batch).operations]


def test_words_at_once_are_the_launches_of_words_one_by_one() -> None:
    at_once, one_by_one = Words(words_at_once), Words(words_one_by_one)
    for seed in range(3):
        for model in (at_once, one_by_one):
            model(sentences(seed))
    expected = sorted(operations(one_by_one, sentences(3)))
    assert sorted(operations(at_once, sentences(3))) == expected
    assert_launches(at_once, sentences(3), fxbatch.explain(one_by_one, sentences(3)).launches_after)


@pytest.mark.parametrize("forward", FORMS)
def test_no_call_has_a_size_of_its_own(forward: Callable[..., Any]) -> None:
    model = ListOfWords(forward)
    for seed in range(3):
        model(sentences(seed))
    model(sentences(3))
    names = operations(model, sentences(4))
    assert not any("getitem" in name or "unbind" in name or "stack" in name for name in names), names
    assert not any("[3" in name or "[5" in name for name in names), names


@pytest.mark.parametrize("forward", APART)
def test_what_is_read_otherwise_stays_whole(forward: Callable[..., Any]) -> None:
    names = operations(ListOfWords(forward), [torch.tensor([1, 2, 3, 4, 5])] * 2)
    assert any("[5" in name for name in names), names


@pytest.mark.parametrize("options", [{"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}])
def test_tables_whose_gradients_count_rows_are_looked_up_as_written(options: dict[str, Any]) -> None:
    assert unstack_rows_module._rank_after(nn.Embedding(9, 4, **options), 1) == 0
    assert unstack_rows_module._rank_after(nn.Embedding(9, 4, padding_idx=0), 1) == 2


def test_a_hook_or_a_class_of_the_users_keeps_a_module_whole() -> None:
    hooked, own = nn.Linear(4, 4), type("Own", (nn.Linear,), {})(4, 4)
    hooked.register_forward_hook(lambda *_: None)
    assert [unstack_rows_module._rank_after(m, 2) for m in (hooked, own, nn.Linear(4, 4))] == [0, 0, 2]
    both = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    assert unstack_rows_module._rank_after(both, 2) == 2
    both.register_forward_hook(lambda m, x, y: y - y.mean(0))
    assert unstack_rows_module._rank_after(both, 2) == 0
    assert unstack_rows_module._rank_after(nn.Linear(4, 4), 1) == 0  # features are no rows
    assert unstack_rows_module._rank_after(nn.LayerNorm((3, 4)), 2) == 0


@pytest.mark.parametrize("deduplicate", ["auto", True])
def test_words_that_are_written_to_after_a_minibatch_was_planned_are_read_anew(deduplicate: Any) -> None:
    model, words = Words(words_at_once), sentences(0)
    model.forward = fxbatch.autobatch(adaptive=False, deduplicate=deduplicate)(
        Words.forward.__wrapped__
    ).__get__(model)  # type: ignore[method-assign, attr-defined]
    data = fxbatch.TracedDataset(model.forward, words)
    for ready in fxbatch.prefetch(model.forward, [[data[i] for i in range(len(words))]] * 2):
        words[0][0] = (words[0][0] + 1) % 9
        batched = model.forward(ready)
        with fxbatch.disabled():
            torch.testing.assert_close(batched, model.forward(words))
