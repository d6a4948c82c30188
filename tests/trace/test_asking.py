"""What an instance gets that asks for a number is what the tensor gives; what it keeps while it waits is its own."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fxbatch
from fxbatch.errors import TraceError
from fxbatch.trace.places import written_to
from fxbatch.trace.state import ThreadModes
from fxbatch.trace.user_line import line_of, user_line, user_place
from tests.trace.made import value
from tests.trace.oracle import recorded
from tests.trace.reference import ReferenceExecution

TYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool,
    torch.complex64,
)  # fmt: skip
NUMBERS = (0.0, 2.75, -1.0, float("inf"), float("nan"))
ASKS: dict[str, Callable[[Any], Any]] = {
    "item": lambda v: v.item(),
    "tolist": lambda v: v.tolist(),
    "bool": bool,
    "int": int,
    "float": float,
    "complex": complex,
    "index": operator.index,
}


def _outcome(ask: Callable[[Any], Any], x: Any) -> tuple[Any, Any]:
    try:
        found = ask(x)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        return type(error), str(error).splitlines()[0]
    return type(found), repr(found)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("ask", ASKS)
def test_numbers_are_those_of_the_tensor(ask: str, dtype: torch.dtype) -> None:
    whole = dtype in (torch.int64, torch.int32, torch.uint8, torch.bool)
    numbers = [0, 1, 3] if whole else NUMBERS
    shapes: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1), (2,))
    xs = [
        torch.full(shape, number, dtype=torch.complex64 if dtype.is_complex else torch.float64).to(dtype)
        for number in numbers
        for shape in shapes
    ]

    def fn(x: Any) -> Any:
        return _outcome(ASKS[ask], x.clone().clone())

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("warnings.warn", lambda *_, **__: None)
        expected = [fn(x) for x in xs]
        _, recording, _ = recorded(lambda x: fn(_as_value(x)), xs)
    assert recording.results == expected


def _as_value(x: Any) -> Any:
    """A value with this content."""
    return torch.stack([x, _zero(x)])[0]


def _zero(x: torch.Tensor) -> Any:
    """A value of zeros: what is asked for depends on a call that has not run."""
    from fxbatch.trace.state import current_recorder

    recorder = current_recorder()
    assert recorder is not None
    return recorder.constant(torch.zeros_like(x))


def test_tensors_and_numbers_of_several_types_in_one_phase() -> None:
    @fxbatch.autobatch(out="list")
    def fn(x: torch.Tensor) -> Any:
        y = torch.stack([value(x), x]) * 2
        if x.shape[0] == 2:
            return y.tolist()
        if x.shape[0] == 3:
            return (y.sum() > 0).item(), int(y.argmax())
        return y.numpy().tolist(), float(y.sum())

    xs = [torch.randn(n) for n in (2, 3, 4, 2, 3, 4)]
    with torch.no_grad():
        found = fn(xs)
        with fxbatch.disabled():
            assert found == fn(xs)


def test_a_phase_reads_numbers_once() -> None:
    def fn(x: Any) -> Any:
        return (value(x) * 2).sum().item()

    xs = [torch.randn(4) for _ in range(5)]
    _, recording, execution = recorded(fn, xs)
    assert isinstance(execution, ReferenceExecution) and execution.reads == [5]
    assert recording.results == [(x * 2).sum().item() for x in xs]


def phases_as_in_the_loop(fn: Callable[[Any], Any], xs: list[torch.Tensor]) -> int:
    """How many phases a forward took without gradients, whose results are those of the loop."""
    with torch.no_grad():
        found, recording, _ = recorded(fn, xs)
        with fxbatch.disabled():
            assert found == [fn(x) for x in xs]
    return len(recording.statistics.phases)


def test_rows_of_what_has_run_are_not_waited_for() -> None:
    """`best[0][k]`, one after another, as a beam search asks; of what was written to since, the new numbers."""

    def fn(x: Any) -> Any:
        best, at = torch.topk(value(x) * 2, 2)
        asked = [
            (at[0][k].item(), best[0][k].item(), best[0, k].tolist(), float(best[-1][k])) for k in range(2)
        ]
        best[0] += 1
        return (*asked, best[0][1].item(), best[0].tolist(), best.sum().item())

    xs = [torch.randn(2, 5) for _ in range(4)]
    assert phases_as_in_the_loop(fn, xs) == 3, "of the best, of what was written, of the sum"


def test_tensors_and_views_of_what_has_run_are_not_waited_for() -> None:
    """Scores that are read one after another, as old parsers do; of what was written to since, the new numbers."""
    index = torch.tensor([1, 0])

    def fn(x: Any) -> Any:
        rows = [torch.tanh(value(x)[i : i + 1] * (i + 1)) for i in range(4)]
        asked = [
            (
                y.data.numpy()[0, 0].item(), y.detach().numpy().tolist(), y.squeeze().tolist(), y[0, 1].item(),
                y.view(-1)[1:].data.tolist(), y.t()[2].item(), y.unsqueeze(0).transpose(0, 1).numpy().tolist(),
                [z.tolist() for z in (*y[0].unbind(0), *y.split(2, 1), *y.chunk(3, 1))], y.chunk(2, 1)[1][0].tolist(),
            )
            for y in rows
        ]  # fmt: skip
        rows[0][0] += 1
        rows[1].data.mul_(2)
        return *asked, rows[0].data.numpy().tolist(), rows[1].numpy().tolist(), rows[2][:, index].tolist()

    xs = [torch.randn(4, 3) for _ in range(4)]
    assert phases_as_in_the_loop(fn, xs) == 3, "of the rows, of what was written, of what an index takes"


def test_tests_of_what_has_run_are_not_waited_for() -> None:
    """`if word == end`, of one word after another of a value that has run, as decoders ask."""

    def fn(x: Any) -> Any:
        words = torch.topk(value(x) * 2, 3)[1]
        scores = value(x).exp()
        asked: list[Any] = [len(words), words[0].item(), float(scores[0])]
        for word in words:
            if word == 2 or word % 2 != 0:
                asked.append(word.item())
            asked.append(int(word // 2 + 1 - word))
        asked += [
            bool(torch.equal(words[:2], words[1:])),
            bool((words == 4).any()),
            bool(words[0] < words[1]),
        ]
        asked += [
            bool(scores[1] > scores[2]),
            bool(scores[1] > 0.25),
            bool((scores[1] > 0.1) & (words[0] != 1)),
        ]
        return (
            *asked,
            bool(scores[1] - scores[2] > 0.5),
        )  # which waits: numbers of floats are of their batch

    xs = [torch.randn(5) for _ in range(6)]
    assert phases_as_in_the_loop(fn, xs) == 2, "of words and scores, of the difference"


def test_equal_is_a_call_like_others() -> None:
    """`torch.equal` of values that have not run: one wait for all instances, and no other for sizes that differ."""

    def fn(x: Any) -> Any:
        y = value(x) * 2
        return torch.equal(y, x * 2), y.equal(x * 3), torch.equal(y, y[:2]), torch.equal(x, y / 2)

    xs = [torch.randn(3) for _ in range(4)]
    assert phases_as_in_the_loop(fn, xs) == 3


def test_places_are_the_lines_of_the_user() -> None:
    assert line_of(user_place()) == user_line()
    assert line_of(None) == ""


CHANGES: dict[str, Callable[[], Any]] = {
    "grad": lambda: torch.set_grad_enabled(not torch.is_grad_enabled()),
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "functions": lambda: torch.device("cpu"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_other_modes_are_told_apart(change: str) -> None:
    modes = ThreadModes()
    assert modes.are_those_now()
    with CHANGES[change]():
        assert not modes.are_those_now()
    assert modes.are_those_now()
    if change in ("grad", "autocast"):  # the others' `with` would end what is not there any more
        with CHANGES[change]():
            modes.restore()
            assert modes.are_those_now()


def test_constants_that_were_written_to() -> None:
    a, b, c = torch.zeros(2), torch.zeros(2), torch.zeros(2)
    kept: Any = [("a", a, a._version), ("b", b, b._version), ("c", c, None)]
    assert written_to(kept) is None and written_to([]) is None
    c.add_(1)
    assert written_to(kept) is None
    b.add_(1)
    assert written_to(kept) == "b"


def test_constants_that_require_gradients() -> None:
    def fn(x: Any) -> Any:
        y = torch.stack([value(x), x]) * 2
        return y, y.requires_grad

    xs = [torch.randn(2).requires_grad_(flag) for flag in (False, True)]
    _, recording, _ = recorded(fn, xs)
    assert [flag for _, flag in recording.results] == [False, True]


class Deletes(torch.nn.Module):
    """Takes an attribute away after it has waited, in a way that its code does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.mark = 1

    @fxbatch.autobatch(adaptive=False)
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        seen = "mark" in self.__dict__
        if float(y) > -1e9 and seen:
            delattr(self, "".join(["ma", "rk"]))
        return y * seen


def test_an_attribute_that_others_have_seen_is_not_taken_away() -> None:
    model = Deletes()
    with pytest.raises(TraceError, match=r"Deletes\.mark is set .* and an instance waits for a value"):
        model([torch.ones(2)] * 3)
    assert model.mark == 1
