"""What differs from the loop by design, as docs/promises.md says: each difference is shown, that changes are seen."""

from __future__ import annotations

import contextlib
import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import Variable

import fxbatch
from tests.oracle import check_equal
from tests.trust.programs import model, two, vectors


def test_results_that_are_views_of_one_another_are_tensors_of_their_own() -> None:
    def forward(self: Any, x: Any) -> Any:
        h = self.a(x)
        return h, h[:2]

    made = model(forward, two(), out="list")
    with torch.no_grad():
        for whole, part in made(vectors(4, 4)):
            before = whole.clone()
            part.zero_()
            assert torch.equal(whole, before)
        with fxbatch.disabled():
            for whole, part in made(vectors(4, 4)):
                part.zero_()
                assert not whole[:2].any()


def test_hooks_of_parameters_are_called_once_and_in_another_order() -> None:
    def called(*, loop: bool) -> list[str]:
        made, names = model(lambda self, x: self.b(self.a(x)), two()), list[str]()
        for name, p in made.named_parameters():
            p.register_hook(lambda _, name=name: names.append(name))
        with fxbatch.disabled() if loop else contextlib.nullcontext():
            made(vectors(4, 4)).sum().backward()
        return names

    batched, looped = called(loop=False), called(loop=True)
    assert sorted(batched) == sorted(dict.fromkeys(looped)) and batched != looped


def test_instances_written_to_through_data_change_no_gradient() -> None:
    def gradient(*, loop: bool, writes: bool) -> torch.Tensor:
        torch.manual_seed(0)
        made, xs = model(lambda self, x: self.a(x), two()), vectors(4, 4)
        with fxbatch.disabled() if loop else contextlib.nullcontext():
            result = made(xs)
        for x in xs:
            x.data.mul_(3 if writes else 1)
        result.sum().backward()
        assert made.a.weight.grad is not None
        return made.a.weight.grad

    as_they_were = gradient(loop=True, writes=False)
    torch.testing.assert_close(gradient(loop=False, writes=True), as_they_were)
    torch.testing.assert_close(gradient(loop=True, writes=True), 3 * as_they_were)


def test_a_row_that_a_value_chose_is_no_view_any_more_after_a_wait() -> None:
    def forward(self: Any, x: Any) -> Any:
        rows, h = torch.zeros(4, 4), self.a(x)
        row = rows[h.argmax()]
        if h.sum() < 1e9:
            rows.add_(1.0)
        return row

    made = model(forward, two())
    with torch.no_grad():
        assert not made(vectors(4, 4)).any()
        with fxbatch.disabled():
            assert made(vectors(4, 4)).all()


def test_what_only_overwritten_values_depend_on_has_no_gradient() -> None:
    def forward(self: Any, x: Any) -> Any:
        h = self.b(x)
        h.zero_()
        return self.a(x) + h

    made = model(forward, two())
    made(vectors(4, 4)).sum().backward()
    assert made.b.weight.grad is None and made.a.weight.grad is not None
    with fxbatch.disabled():
        made(vectors(4, 4)).sum().backward()
    assert made.b.weight.grad is not None and not made.b.weight.grad.any()


def switched(h: Any) -> Any:
    h = h.detach()
    h.requires_grad = True
    assert h.requires_grad and h.is_leaf == (type(h) is torch.Tensor)
    return h


@pytest.mark.parametrize(
    "leaf",
    [
        copy.copy,
        lambda h: Variable(h, requires_grad=True),
        lambda h: h.detach().requires_grad_(),
        lambda h: h.new(4).fill_(0.5).requires_grad_(),
        switched,
    ],
    ids=["copy", "Variable", "detach", "new", "attribute"],
)
def test_leaves_that_are_made_of_values_require_no_gradient(leaf: Any) -> None:
    made = model(lambda self, x: (leaf(self.a(x)) * 2, self.b(leaf(self.a(x)))), two(), out="list")
    xs = vectors(4, 4)
    results = made(xs)
    with fxbatch.disabled():
        expected = made(xs)
    for (alone, used), (other, wanted) in zip(results, expected, strict=True):
        assert (alone.requires_grad, other.requires_grad) == (False, True)
        torch.testing.assert_close((alone, used), (other.detach(), wanted))


def test_classes_are_asked_by_isinstance() -> None:
    def forward(self: Any, x: Any) -> Any:
        h = self.a(x)
        found = isinstance(h, torch.Tensor) and isinstance(self.a.weight, nn.Parameter)
        return h, found, type(h) is torch.Tensor

    made = model(forward, two(), out="list")
    assert [(found, same) for _, found, same in made(vectors(4, 4))] == [(True, False)] * 2
    with fxbatch.disabled():
        assert [(found, same) for _, found, same in made(vectors(4, 4))] == [(True, True)] * 2


def test_prints_of_instances_that_wait_are_interleaved(capsys: pytest.CaptureFixture[str]) -> None:
    def forward(self: Any, x: Any) -> Any:
        print("before")
        y = self.a(x) if self.b(x).sum() > 0 else self.b(x)
        print("after")
        return y

    made = model(forward, two())
    made(vectors(4, 4))
    assert capsys.readouterr().out.split() == ["before", "before", "after", "after"]
    with fxbatch.disabled():
        made(vectors(4, 4))
    assert capsys.readouterr().out.split() == ["before", "after"] * 2


def test_a_lock_is_held_while_its_instance_waits() -> None:
    lock = threading.Lock()

    def forward(self: Any, x: Any) -> Any:
        free = lock.acquire(blocking=False)  # without that, the second instance would wait for good
        h = self.a(x)
        if h.sum() > 1e9:
            h = h * 2
        if free:
            lock.release()
        return h, free

    made = model(forward, two(), out="list")
    assert [free for _, free in made(vectors(4, 4))] == [True, False]
    with fxbatch.disabled():
        assert [free for _, free in made(vectors(4, 4))] == [True, True]


def test_random_numbers_are_drawn_in_another_order() -> None:
    made = model(lambda self, x: self.d(self.b(self.d(self.a(x)))), {**two(), "d": nn.Dropout(0.5)})
    xs = vectors(*[4] * 6)
    torch.manual_seed(0)
    batched = made(xs)
    torch.manual_seed(0)
    with fxbatch.disabled():
        assert not torch.equal(made(xs), batched)


def test_what_the_check_runs_again_it_runs_twice_outside_the_model(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Module and instances are copied, globals and closures are put back; what is printed is not."""

    def forward(self: Any, x: Any) -> Any:
        calls.append(1)
        self.seen += 1
        print("here")
        return self.a(x)

    calls: list[int] = []
    made = model(forward, {**two(), "seen": 0}, check=1)
    made(vectors(4, 4))
    assert made.seen == len(calls) == 2
    assert capsys.readouterr().out.split() == ["here"] * 4


def test_the_check_compares_random_results_by_type_only() -> None:
    made = model(lambda self, x: self.d(self.b(self.d(self.a(x)))), {**two(), "d": nn.Dropout(0.5)}, check=1)
    with pytest.warns(fxbatch.CheckWarning, match="by shape and type only: they depend on random numbers"):
        made(vectors(*[4] * 6))


def test_the_last_digits_may_differ() -> None:
    made = model(lambda self, x: self.a(x).exp().sum(), {"a": nn.Linear(64, 64)})
    xs = [torch.randn(64) for _ in range(32)]
    with fxbatch.disabled():
        loop = made(xs)
    assert not torch.equal(made(xs), loop)
    check_equal(made, xs)


def test_full_backward_hooks_and_script_modules_are_refused() -> None:
    made = model(lambda self, x: self.a(x), two())
    made.a.register_full_backward_hook(lambda *_: None)
    with pytest.raises(fxbatch.TraceError, match="backward hook"):
        made(vectors(4))
    scripted = torch.jit.trace(nn.Linear(4, 4), torch.randn(4))
    with pytest.raises(fxbatch.TraceError, match="TorchScript"):
        model(lambda self, x: self.s(x), {"s": scripted})(vectors(4))
