"""What can't be recorded is refused: a forward that catches the refusal gives nothing of its own."""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxbatch

pytestmark = pytest.mark.usefixtures("as_users_have_it")


class Layer(nn.Module):
    """A layer, a counter, and a forward of choice."""

    def __init__(self, code: Callable[[Layer, Tensor], Tensor]) -> None:
        super().__init__()
        self.l, self.n, self.code = nn.Linear(3, 3), 0, code

    def forward(self, x: Tensor) -> Tensor:
        """One instance."""
        return self.code(self, x)


def gradient(m: Layer, x: Tensor) -> Tensor:
    h = m.l(x)
    try:
        g = torch.autograd.grad(h.sum(), [m.l.bias], retain_graph=True)[0]
    except Exception:  # noqa: BLE001
        g = torch.zeros(3)
    return h.sum() + g.sum()


def sparse(m: Layer, x: Tensor) -> Tensor:
    h = m.l(x)
    k = torch.tensor(0.0)
    with contextlib.suppress(Exception):
        k = (h.detach().t() @ h.detach()).to_sparse().values().sum()
    return h.sum() + k


def strides(m: Layer, x: Tensor) -> Tensor:
    h = m.l(x)
    try:
        k = h.stride()[0]
    except:  # noqa: E722 - as people write it
        k = -100
    return h.sum() + k


def pickled(m: Layer, x: Tensor) -> Tensor:
    h = m.l(x)
    try:
        k = len(pickle.dumps(h.detach()))
    except Exception:  # noqa: BLE001
        k = 0
    return h.sum() + k


def again_and_again(m: Layer, x: Tensor) -> Tensor:
    h = m.l(x)
    while True:
        try:
            return h.sum() + h.stride()[0]
        except Exception:  # noqa: BLE001
            continue


def in_a_finally(m: Layer, x: Tensor) -> Tensor:
    def rows() -> Iterator[Tensor]:
        try:
            while True:
                yield m.l(x[0])
        finally:
            m.n += 1

    row = rows()
    first = next(row)
    return first.sum() + next(row).sum().item()


def loaded(m: Layer, x: Tensor) -> Tensor:  # torch makes a RuntimeError of what it catches
    fast = copy.deepcopy(m.l)
    state = fast.state_dict()
    state["weight"] = state["weight"] - m.l(x).detach().mean(0)
    fast.load_state_dict(state)
    return fast(x).sum()


CODES = (gradient, sparse, strides, pickled, again_and_again, in_a_finally, loaded)


@pytest.mark.parametrize("code", CODES, ids=lambda code: code.__name__)
def test_the_loop_runs(code: Any) -> None:
    torch.manual_seed(0)
    model, plain = Layer(code), Layer(code)
    plain.load_state_dict(model.state_dict())
    batched = fxbatch.autobatch(Layer.forward)
    for _ in range(4):
        xs = [torch.randn(n, 3) for n in (2, 3, 1, 2)]
        torch.testing.assert_close(batched(model, xs), torch.stack([plain(x) for x in xs]))
        assert model.n == plain.n


@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # in a generator that is let go
@pytest.mark.parametrize("code", CODES, ids=lambda code: code.__name__)
def test_where_all_is_batched_it_is_raised(code: Any) -> None:
    batched = fxbatch.autobatch(adaptive=False)(Layer.forward)
    with pytest.raises(fxbatch.TraceError, match=r"test_refusals_that_are_caught.py:\d+"):
        batched(Layer(code), [torch.randn(n, 3) for n in (2, 3, 1)])


def test_what_catches_all_that_it_is_told_is_left() -> None:
    """A loop that goes on until an answer comes, while another instance has failed."""

    def code(m: Layer, x: Tensor) -> Tensor:
        h = m.l(x).sum()
        if len(x) == 1:
            raise KeyError("the user's")
        while True:
            try:
                return h + h.item()
            except:  # noqa: E722
                continue

    batched = fxbatch.autobatch(adaptive=False)(Layer.forward)
    with pytest.raises(KeyError, match="the user's"):
        batched(Layer(code), [torch.randn(n, 3) for n in (2, 3, 1)])


def test_what_the_loop_raises_too_is_the_forwards() -> None:
    def code(m: Layer, x: Tensor) -> Tensor:
        h = m.l(x).sum()
        try:
            return h * len(h)
        except TypeError:
            return h

    model = Layer(code)
    xs = [torch.randn(n, 3) for n in (2, 3, 1)]
    batched = fxbatch.autobatch(adaptive=False)(Layer.forward)
    torch.testing.assert_close(batched(model, xs), torch.stack([model(x) for x in xs]))


def computed_data(m: Layer, x: Tensor) -> Tensor:
    h, t = m.l(x), torch.zeros(3)
    t.data = h.data.mean(0)
    return h.sum() + t.sum()


def gradients_on(m: Layer, x: Tensor) -> Tensor:
    with torch.enable_grad():
        return m.l(x).sum()


def gradients_on_after_a_wait(m: Layer, x: Tensor) -> Tensor:
    scale = m.l(x).sum().item()
    with torch.enable_grad():
        return m.l(x).sum() * scale


@pytest.mark.parametrize("code", [computed_data, gradients_on, gradients_on_after_a_wait])
def test_what_a_batch_would_give_otherwise_runs_the_loop(code: Any) -> None:
    torch.manual_seed(0)
    model, plain = Layer(code), Layer(code)
    plain.load_state_dict(model.state_dict())
    batched = fxbatch.autobatch(out="list")(Layer.forward)
    for _ in range(4):
        xs = [torch.randn(n, 3) for n in (2, 3, 1, 2)]
        with torch.no_grad():
            found, expected = batched(model, xs), [plain(x) for x in xs]
        torch.testing.assert_close(found, expected)
        assert [x.requires_grad for x in found] == [x.requires_grad for x in expected]
    with torch.no_grad(), pytest.raises(fxbatch.TraceError, match=r"test_refusals_that_are_caught.py:\d+"):
        fxbatch.autobatch(adaptive=False)(Layer.forward)(model, xs)


def test_gradients_that_are_switched_on_for_no_result_are_batched() -> None:
    def code(m: Layer, x: Tensor) -> Tensor:
        with torch.enable_grad():
            h = m.l(x)
        return h.argmax()

    model = Layer(code)
    xs = [torch.randn(n, 3) for n in (2, 3, 1, 2)]
    with torch.no_grad():
        found = fxbatch.autobatch(adaptive=False)(Layer.forward)(model, xs)
        assert found.tolist() == [int(model(x)) for x in xs]


def test_data_of_a_parameter_that_is_written_to() -> None:
    """Torch counts no such write; calls of all instances run after it."""

    def code(m: Layer, x: Tensor) -> Tensor:
        h = m.l(x)
        m.l.weight.data[0].mul_(1.5)
        return h.sum()

    model, plain = Layer(code), Layer(code)
    plain.load_state_dict(model.state_dict())
    xs = [torch.randn(n, 3) for n in (2, 3, 1, 2)]
    batched = fxbatch.autobatch(Layer.forward)
    torch.testing.assert_close(batched(model, xs), torch.stack([plain(x) for x in xs]))
    with pytest.raises(
        fxbatch.InPlaceError, match=r"weight, which .* reads, was written to while instances ran"
    ):
        fxbatch.autobatch(adaptive=False)(Layer.forward)(model, xs)


def test_gradients_that_are_on_already_are_no_reason_against_a_packed_forward() -> None:
    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(3, 3)

        @fxbatch.autobatch(adaptive=False)
        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                h = self.l(x)
            return torch.softmax(h, 0).sum(1).mean()

    model = Scores()
    xs = [torch.randn(n, 3) for n in range(2, 30)]
    for _ in range(3):
        found = model(xs)
    with fxbatch.disabled():
        torch.testing.assert_close(found, model(xs))
    (engine,) = vars(model)["_fxbatch_engines"].values()
    assert not engine.packed_calls.families  # one for each of its calls, otherwise
