"""Products that C does for many steps at once, before the first step or after the last, and weights that it packs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fxbatch.codegen.kernel import Workspace
from fxbatch.codegen.native import extension
from tests.oracle import check_equal, run
from tests.trust.programs import model

pytestmark = pytest.mark.skipif(extension is None, reason="the extension was not built")
SIZE = 64  # 256 x 64 weights: the smallest that are worth it
State = tuple[torch.Tensor, torch.Tensor]
How = Callable[[Any, list[torch.Tensor]], list[torch.Tensor]]


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    """What all rooms so far counted: products that were done for several steps at once, weights that were packed."""
    rooms: dict[int, Any] = {}
    before = Workspace.native_room

    def room(self: Workspace) -> Any:
        found = before(self)
        rooms[id(found)] = found
        return found

    monkeypatch.setattr(Workspace, "native_room", room)
    return lambda name: sum(getattr(x, name) for x in rooms.values())


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def chain(self: Any, words: list[torch.Tensor]) -> list[torch.Tensor]:
    """A state after each word, as a tagger has it."""
    state, found = None, []
    for word in words:
        state = self.cell(word, state)
        found.append(state[0])
    return found


def two_directions(self: Any, words: list[torch.Tensor]) -> list[torch.Tensor]:
    """The second layer's directions are of one component, and its input comes from a concatenation."""
    left, right = chain(self, words), chain(self, words[::-1])[::-1]
    words = [torch.cat(pair) for pair in zip(left, right, strict=True)]
    state, other, found = None, None, []
    for word, back in zip(words, words[::-1], strict=True):
        state, other = self.second(word, state), self.third(back, other)
        found.append(torch.cat([state[0], other[0]]))
    return [self.out(x) for x in found]


def fed_back(self: Any, words: list[torch.Tensor]) -> list[torch.Tensor]:
    """Each word is read with the state before it: nothing is there ahead."""
    state, found = None, []
    for word in words:
        state = self.cell(word if state is None else word + state[0], state)
        found.append(state[0])
    return found


def read_again(self: Any, words: list[torch.Tensor]) -> list[torch.Tensor]:
    """Every third input is a state of two steps before, in the arena of the words."""
    found: list[torch.Tensor] = []
    state = None
    for i, word in enumerate(words):
        state = self.cell(found[i - 2] if i % 3 == 2 else word, state)
        found.append(state[0])
    return found


def not_native(self: Any, words: list[torch.Tensor]) -> list[torch.Tensor]:
    """Python runs a step after each of C's."""
    h = c = words[0]
    found = []
    for word in words:
        h, c = self.cell(word, (h, c))
        h = torch.special.i0e(h)
        found.append(h)
    return found


def made_of(how: How, width: int = SIZE) -> Any:
    torch.manual_seed(0)
    parts = {
        "inner": nn.Linear(8, width),
        "cell": nn.LSTMCell(width, SIZE),
        "second": nn.LSTMCell(2 * SIZE, SIZE),
        "third": nn.LSTMCell(2 * SIZE, SIZE),
        "out": nn.Linear(2 * SIZE, 5),
    }

    def forward(self: Any, words: list[torch.Tensor]) -> torch.Tensor:
        found = how(self, [torch.tanh(self.inner(word)) for word in words])
        total = found[0]
        for x in found[1:]:
            total = total + x
        return total

    return model(forward, parts, native=True)


def sentences(*lengths: int) -> list[list[torch.Tensor]]:
    torch.manual_seed(1)
    return [list(torch.randn(n, 8).unbind()) for n in lengths]


HOWS = [chain, two_directions, fed_back, read_again, not_native]


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("lengths", [(9,), (3, 14, 1, 7), (6,) * 40], ids=str)
def test_as_the_loop(how: How, lengths: tuple[int, ...]) -> None:
    made, instances = made_of(how), sentences(*lengths)
    check_equal(made, instances)
    if how in (chain, two_directions):
        check_equal(made_of(how, SIZE + 36), instances)  # gates that end within a panel
    with torch.no_grad():
        check_equal(made, instances, gradients=False)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.data.mul_(0.5)  # not counted as a new version
    check_equal(made, instances)


@pytest.mark.parametrize(
    ("how", "forward", "both"), [(chain, 8, 16), (two_directions, 24, 48), (fed_back, 0, 0)]
)
def test_words_are_multiplied_at_once(
    how: How, forward: int, both: int, counts: Callable[[str], int]
) -> None:
    wide = 0 if how is fed_back else 32  # words in an arena of their own
    made, instances = made_of(how, SIZE + wide), sentences(9)
    with torch.no_grad():
        made(instances)
    assert counts("apart") == forward
    made(instances).sum().backward()
    assert counts("apart") == forward + both


@pytest.mark.parametrize("how", HOWS)
def test_the_same_on_two_threads(how: How, threads: None) -> None:
    made, instances = made_of(how), sentences(*[5, 8] * 20)
    torch.set_num_threads(1)
    wanted = run(made, [instances])
    torch.set_num_threads(2)
    found = run(made, [instances])
    assert all(a is b or torch.equal(a, b) for a, b in zip(found, wanted, strict=True))  # type: ignore[arg-type]


def test_under_a_profiler_steps_run_one_by_one(counts: Callable[[str], int]) -> None:
    made, instances = made_of(chain), sentences(4, 6)
    wanted = run(made, [instances])
    before = counts("apart")
    with torch.profiler.profile(acc_events=True):
        found = run(made, [instances])
    assert counts("apart") == before
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_weights_are_packed_once_a_run(counts: Callable[[str], int]) -> None:
    """Where steps of enough rows repay it, and never kept: a write through `.data` leaves no trace."""
    made, instances = made_of(fed_back), sentences(*[6] * 40)
    with torch.no_grad():
        made(instances[:2])
        assert counts("packed") == 0
        made(instances)
        assert counts("packed") == 2  # for input and state
    made.cell.weight_hh.data.mul_(0.5)
    made(instances).sum().backward()
    assert counts("packed") == 6  # and the other way round, for their gradients
    made.cell.weight_ih.data.mul_(0.5)
    check_equal(made, instances)
    assert counts("packed") > 6
