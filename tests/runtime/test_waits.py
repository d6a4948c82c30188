"""Forwards that change what instances share and wait for values: the loop runs them, or an error names the line."""

from __future__ import annotations

import contextlib
import copy
import io
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import fxbatch
from fxbatch.errors import LoopWarning, TraceError
from fxbatch.runtime.strategy import AdaptiveSwitch, Choice, Strategy
from fxbatch.trace.state import settings_now
from tests.oracle import check_equal
from tests.trace.made import check_state, instances, linear, model


class Stateful(nn.Module):
    """A submodule with a counter and a last value, traced through since it branches."""

    def __init__(self) -> None:
        super().__init__()
        self.l = linear()
        self.seen = 0
        self.last: Any = None

    def forward(self, x: Any) -> Any:
        self.seen += 1
        self.last = self.l(x)
        if self.last.sum() > 0:
            self.seen += 1
        y = self.last * self.seen
        self.last = None
        return y


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("b", torch.ones(4))


def held(self: Any, x: Any) -> Any:
    self.h = self.l(x)
    if self.h.sum() > 0:
        self.h = self.h * 2
    y, self.h = self.h, None
    return y


def counted(self: Any, x: Any) -> Any:
    self.n += 1
    if self.l(x).sum() > 0:
        self.n += 1
    return self.l(x) * self.n


def set_after_the_wait(self: Any, x: Any) -> Any:
    h = self.l(x)
    if h.sum() > 0:
        h = h * 2
    self.n += 1
    return h * self.n


def counted_after_waits_of_different_numbers(self: Any, x: Any) -> Any:
    if self.l(x).sum() > 0:
        self.n += 1
        if self.l(x)[0] > 0:
            self.n += 2
    return self.l(x) * self.n


def logged(self: Any, x: Any) -> Any:
    h = self.l(x)
    if h.sum() > 0:
        h = h * 2
    self.log.append(round(h.detach().sum().item(), 3))
    return h * len(self.log)


def logged_by_another_name(self: Any, x: Any) -> Any:
    log = self.log
    h = self.l(x)
    if h.sum() > 0:
        h = h * 2
    log.append(1)
    return h * len(log)


def logged_before(self: Any, x: Any) -> Any:
    self.log.append(1)
    h = self.l(x) * len(self.log)
    return h * 2 if h.sum() > 0 else h


def tallied(self: Any, x: Any) -> Any:
    h = self.l(x)
    self.calls["n"] += 1
    if h.sum() > 0:
        h = h * 2
        self.calls["m"] += 1
    return h * self.calls["n"] * (1 + self.calls["m"])


def made_late(self: Any, x: Any) -> Any:
    if not hasattr(self, "c"):
        self.c = 0
    if self.l(x).sum() > 0:
        self.c = self.c + 1
    return self.l(x) * (1 + self.c)


def taken_away(self: Any, x: Any) -> Any:
    before = getattr(self, "mark", 5)
    self.mark = 1
    if self.l(x).sum() > 0:
        del self.mark
    return self.l(x) * before


def by_a_made_up_name(self: Any, x: Any) -> Any:
    h = self.l(x)
    if h.sum() > 0:
        h = h * 2
    setattr(self, "st" + "ate", round(h.sum().item(), 3))
    return h * self.state


def submodule(self: Any, x: Any) -> Any:
    return self.s(x) + self.s(x * 2)


def switched_off(self: Any, x: Any) -> Any:
    self.d.eval()
    h = self.l(x)
    if h.sum() > 0:
        h = h * 2
    h = h * (2 if self.d.training else 3)
    self.d.train()
    return h


def buffer_replaced(self: Any, x: Any) -> Any:
    h = self.l(x)
    if h.sum() > 0:
        h = h * 2
    self.q.b = self.q.b + 1
    return h * float(self.q.b[0])


def submodule_added(self: Any, x: Any) -> Any:
    h = self.l(x)
    if h.sum() > 0:
        self.many[str(len(self.many))] = nn.Identity()
    return h * (1 + len(self.many))


FORWARDS: dict[Callable[..., Any], tuple[dict[str, Any], str]] = {
    held: ({"h": None}, "Made.h is set (test_waits.py:"),
    counted: ({"n": 0}, "Made.n is set (test_waits.py:"),
    set_after_the_wait: ({"n": 0}, "Made.n is set (test_waits.py:"),
    counted_after_waits_of_different_numbers: ({"n": 0}, "Made.n is set (test_waits.py:"),
    logged: ({"log": list}, "Made.log is changed"), logged_by_another_name: ({"log": list}, "Made.log is changed"),
    logged_before: ({"log": list}, "Made.log is changed"),
    tallied: ({"calls": lambda: {"n": 0, "m": 0}}, "Made.calls is changed"),
    made_late: ({}, "Made.c is set (test_waits.py:"), taken_away: ({}, "Made.mark is set (test_waits.py:"),
    by_a_made_up_name: ({}, "Made.state is set (test_waits.py:"),
    submodule: ({"s": Stateful}, "Stateful.seen is set (test_waits.py:"),
    switched_off: ({"d": nn.Dropout}, "Dropout.training is set (test_waits.py:"),
    submodule_added: ({"many": nn.ModuleDict}, "ModuleDict."), buffer_replaced: ({"q": Buffered}, "Buffered.b is set"),
}  # fmt: skip


def made(forward: Callable[..., Any], **options: Any) -> Any:
    return model(forward, options, l=linear, **FORWARDS[forward][0])


@pytest.fixture(params=[0, 2], ids=["all batched", "two scouts"])
def chooses(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The strategy batches each minibatch, the first instances or none apart."""
    monkeypatch.setattr(AdaptiveSwitch, "on", True)
    choice = Choice(True, request.param)
    monkeypatch.setattr(Strategy, "choose", lambda *_, **__: choice)


def one_warning(caught: list[warnings.WarningMessage]) -> str:
    (warning,) = [w for w in caught if issubclass(w.category, LoopWarning)]
    assert warning.filename.endswith("made.py") or warning.filename == __file__
    return str(warning.message)


@pytest.mark.usefixtures("chooses")
@pytest.mark.parametrize("forward", FORWARDS, ids=lambda f: f.__name__)
def test_values_gradients_and_the_state_left_are_the_loops(
    forward: Callable[..., Any], batches: list[int]
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_state(made(forward), instances(6), times=4)
    message = one_warning(caught)
    assert "Made.forward" not in message  # a function of this file
    assert f"{forward.__name__}: its minibatches run the plain loop: {FORWARDS[forward][1]}" in message
    assert "and an instance waits for a value (test_waits.py:" in message
    assert len(batches) == 1  # the loop from then on


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda f: f.__name__)
def test_it_is_an_error_in_each_call_where_all_are_to_be_batched(forward: Callable[..., Any]) -> None:
    batched = made(forward, adaptive=False)
    for count in (6, 6, 8):
        with pytest.raises(TraceError) as caught:
            batched(instances(count))
        assert FORWARDS[forward][1] in str(caught.value)
        assert 'adaptive="loop"' in str(caught.value)
        assert "waits for a value (test_waits.py:" in str(caught.value)


def test_it_is_an_error_for_one_instance_too() -> None:
    with pytest.raises(TraceError, match=r"Made\.n is set"):
        made(counted, adaptive=False)(instances(1))


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda f: f.__name__)
def test_the_loop_where_it_is_asked_for(forward: Callable[..., Any], batches: list[int]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_state(made(forward, adaptive="loop"), instances(6))
    assert not batches


def test_a_failed_recording_leaves_modules_as_they_were() -> None:
    batched = made(set_after_the_wait, adaptive=False)
    order = list(vars(batched))
    with pytest.raises(TraceError):
        batched(instances(6))
    assert batched.n == 0 and list(vars(batched)) == [*order, "_fxbatch_engines"]
    batched = made(submodule_added, adaptive=False)
    with pytest.raises(TraceError):
        batched(instances(6))
    assert not batched.many


def buffer_written(self: Any, x: Any) -> Any:
    h = self.l(x)
    if h.sum() > 0:
        h = h * 2
    self.q.b.add_(1)
    self.n += 1
    return h * self.q.b


def past_setattr(self: Any, x: Any) -> Any:
    h = self.l(x)
    if h.sum() > 0:
        h = h * 2
    self.many._modules[str(len(self.many))] = nn.Identity()
    return h * (1 + len(self.many))


def hook_added(self: Any, x: Any) -> Any:
    h = self.l(x)
    if h.sum() > 0:
        h = h * 2
    self.d.register_forward_hook(lambda *_: None)
    return h * (1 + len(self.d._forward_hooks))


@pytest.mark.parametrize("forward", [buffer_written, past_setattr, hook_added], ids=lambda f: f.__name__)
def test_what_cannot_be_taken_back_is_an_error_and_then_the_loop(
    forward: Callable[..., Any], batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AdaptiveSwitch, "on", True)
    monkeypatch.setattr(Strategy, "choose", lambda *_, **__: Choice(True))
    parts: dict[str, Any] = {"l": linear, "q": Buffered, "many": nn.ModuleDict, "d": nn.Dropout, "n": 0}
    batched, looped = model(forward, **parts), model(forward, {"adaptive": "loop"}, **parts)
    xs = instances(6)
    with pytest.raises(TraceError, match="and an instance waits for a value"):
        batched(xs)
    for name, x in copy.deepcopy(vars(batched)["_modules"]).items():  # as the error left them
        setattr(looped, name, x)
    looped.n = batched.n
    with pytest.warns(LoopWarning):
        torch.testing.assert_close(batched(xs), looped(xs))
    torch.testing.assert_close(batched(xs), looped(xs))
    assert len(batches) == 1


def test_explain_says_it() -> None:
    made = model(counted, l=linear, n=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AdaptiveSwitch, "on", True)
        found = fxbatch.explain(made, instances(6))
    assert found.strategy.startswith("the plain loop: Made.n is set (test_waits.py:")
    assert "instances ran one after the other, as Made.n is set (test_waits.py:" in found.statistics.hint()


@pytest.mark.usefixtures("chooses")
def test_what_waits_and_sets_nothing_is_batched(batches: list[int]) -> None:
    def forward(self: Any, x: Any) -> Any:
        own = nn.Sequential(
            nn.ReLU(), nn.Dropout(0.0)
        )  # modules of the instance's own, whose attributes it sets
        own.note = 1
        self.h = self.h  # nothing else than before
        h = self.l(x)
        return own(h) * 2 if h.sum() > 0 else own(self.l(h))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_state(model(forward, l=linear, h=None, table={"a": 1}), instances(6))
    assert len(batches) == 2


def test_what_the_first_instance_alone_sets_is_no_change_for_those_after_it(
    monkeypatch: pytest.MonkeyPatch, batches: list[int]
) -> None:
    """A cache that is made at the first call: a scout's."""

    def forward(self: Any, x: Any) -> Any:
        if self.cache is None:
            self.cache = torch.arange(4.0)
        h = self.l(x + self.cache)
        return h * 2 if h.sum() > 0 else h

    monkeypatch.setattr(AdaptiveSwitch, "on", True)
    monkeypatch.setattr(Strategy, "choose", lambda *_, **__: Choice(True, 2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_state(model(forward, l=linear, cache=None), instances(6), times=3)
    assert batches == [1, 3, 4, 4]  # of the first minibatch one alone tells whether it waits after a change


@pytest.mark.usefixtures("chooses")
def test_what_sets_attributes_and_does_not_wait_is_batched(batches: list[int]) -> None:
    def forward(self: Any, x: Any) -> Any:
        self.n += 1
        self.h = self.l(x) * self.n
        self.log.append(self.n)
        return self.h * len(self.log)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_state(model(forward, l=linear, n=0, h=None, log=list), instances(6))
    assert batches in ([6, 6], [1, 3, 4])  # without and with two scouts


def test_all_wait_together_where_nothing_is_set() -> None:
    def forward(self: Any, x: Any) -> Any:
        h = self.l(x)
        return h * 2 if h.sum() > 0 else h

    phases = fxbatch.explain(model(forward, l=linear), instances(8)).statistics.phases
    assert len(phases) == 1
    assert phases[0].instances == 8


# What a process has once


def default_dtype(self: Any, x: Any) -> Any:
    h = self.l(x)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    if h.sum() > 0:
        h = h * 2
    z = torch.ones(4) * h
    torch.set_default_dtype(before)
    return (z + torch.ones(4)).float()


def redirected(self: Any, x: Any) -> Any:
    h = self.l(x)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        print("a")
        if h.sum() > 0:
            print("b")
        print("c")
    return h * len(out.getvalue())


@pytest.mark.parametrize("forward", [default_dtype, redirected], ids=lambda f: f.__name__)
def test_an_instance_that_has_changed_a_setting_of_the_process_is_not_left(
    forward: Callable[..., Any],
) -> None:
    check_state(model(forward, l=linear), instances(5))
    hint = fxbatch.explain(model(forward, l=linear), instances(5)).statistics.hint()
    assert "a setting of the process is changed" in hint


def seeded(self: Any, x: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(int(x[0].abs() * 1e6) if self.others else 0)
        h = self.l(x)
        if h.sum() > 0:
            h = h * 2
        return h + torch.randn(4)


@pytest.mark.usefixtures("as_users_have_it")
@pytest.mark.parametrize("others", [True, False])
@pytest.mark.parametrize("adaptive", [True, False])
def test_each_instance_has_the_numbers_of_its_seed(adaptive: bool, others: bool) -> None:
    made, xs = model(seeded, {"adaptive": adaptive}, l=linear), instances(12)
    made.others = others
    for _ in range(2):
        with torch.random.fork_rng():
            torch.manual_seed(7)
            found, after = made(xs), torch.rand(2)
        torch.manual_seed(7)
        with fxbatch.disabled():
            torch.testing.assert_close(found, made(xs))
        torch.testing.assert_close(after, torch.rand(2))


@pytest.mark.usefixtures("as_users_have_it")
@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize(
    "manager",
    [
        lambda: torch.autograd.detect_anomaly(check_nan=False),
        lambda: sdpa_kernel(SDPBackend.MATH),
        lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION),
        warnings.catch_warnings,
    ],
    ids=["anomaly", "math", "flash", "warnings"],
)
@pytest.mark.filterwarnings("ignore")
def test_what_a_manager_of_torchs_switches_is_as_it_was(manager: Any, adaptive: bool) -> None:
    def forward(self: Any, x: Any) -> Any:
        with manager():
            h = self.l(x)
            inside.append(settings_now())
            if h.sum() > 0:
                h = h * 2
            inside.append(settings_now())
        return h

    made, xs = model(forward, {"adaptive": adaptive}, l=linear), instances(8)
    before = settings_now()
    for _ in range(3):
        inside: list[Any] = []
        made(xs)
        assert settings_now() == before
        assert all(a == b for a, b in itertools.pairwise(inside[::2])) or manager is warnings.catch_warnings
        assert all(a == b for a, b in zip(inside[::2], inside[1::2], strict=True))


@pytest.mark.usefixtures("as_users_have_it")
@pytest.mark.parametrize("adaptive", [True, False])
def test_a_wait_inside_inference_mode_leaves_none(adaptive: bool) -> None:
    def forward(self: Any, x: Any) -> Any:
        with torch.inference_mode():
            k = float(self.l(x).sum())
        return self.l(x) * k

    made = model(forward, {"adaptive": adaptive}, l=linear)
    if adaptive:
        check_equal(made, instances(12))
    else:
        with pytest.raises(TraceError, match="inference_mode"):
            made(instances(12))
    assert not torch.is_inference_mode_enabled()


@pytest.mark.usefixtures("as_users_have_it")
@pytest.mark.parametrize("adaptive", [True, False])
def test_a_checkpoint_inside_which_an_instance_waits(adaptive: bool) -> None:
    def part(self: Any, h: Any) -> Any:
        return torch.sin(self.l(torch.sin(h) if self.k(h).sum() > 0 else h))

    def forward(self: Any, x: Any) -> Any:
        return checkpoint(lambda h: part(self, h), self.l(x), use_reentrant=False).sum()

    made = model(forward, {"adaptive": adaptive}, l=linear, k=linear)
    for _ in range(5):
        check_equal(made, instances(12))


@pytest.mark.usefixtures("as_users_have_it")
def test_hooks_on_what_is_saved_run_the_loop() -> None:
    def forward(self: Any, x: Any) -> Any:
        h = self.l(x)
        with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.bfloat16, lambda t: t.to(h.dtype)):
            return torch.exp(self.l(h.sin()))

    made = model(forward, {"adaptive": True}, l=linear)
    xs = instances(12)
    made(xs).sum().backward()
    found = [p.grad.clone() for p in made.parameters()]
    made.zero_grad()
    with fxbatch.disabled():
        made(xs).sum().backward()
    torch.testing.assert_close(found, [p.grad for p in made.parameters()])
    with pytest.raises(TraceError, match="saved_tensors_hooks"):
        model(forward, {"adaptive": False}, l=linear)(xs)


@pytest.fixture
def float32_by_default() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("float32_by_default")
def test_a_setting_that_is_left_changed_while_others_wait_is_an_error() -> None:
    def forward(self: Any, x: Any) -> Any:
        h = self.l(x)
        if h.sum() > 0:
            h = h * 2
        torch.set_default_dtype(torch.float64)
        return h * torch.ones(4)

    with pytest.raises(TraceError, match="leaves a setting of the process changed"):
        model(forward, l=linear)(instances())


# Torch's modes of a thread stay with their instance


def test_torchs_modes_stay_with_their_instance() -> None:
    def forward(self: Any, x: Any) -> Any:
        if x[0] > 0:
            with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
                h = self.l(x)
                return h.float() * 2 if h.sum() > 0 else h.float()
        h = self.l(x)
        return h * 2 if h.sum() > 0 else h

    xs = instances(8)
    signs = [bool(x[0] > 0) for x in xs]
    assert any(signs) and not all(signs)
    made = model(forward, {"out": "list"}, l=linear)
    with fxbatch.disabled():
        expected = made(xs)
    found = made(xs)
    assert [y.requires_grad for y in found] == [y.requires_grad for y in expected]
    for y, z in zip(found, expected, strict=True):
        torch.testing.assert_close(y, z, rtol=1e-2, atol=1e-2)


@pytest.mark.usefixtures("chooses")
def test_gradients_that_a_forward_leaves_switched_off_are_left_so_by_the_loop(batches: list[int]) -> None:
    def forward(self: Any, x: Any) -> Any:
        h = self.l(x)
        torch.set_grad_enabled(False)
        return h

    made, xs = model(forward, {"out": "list"}, l=linear), instances(6)
    with fxbatch.disabled():
        expected = [y.requires_grad for y in made(xs)]
    try:
        for _ in range(2):
            torch.set_grad_enabled(True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert [y.requires_grad for y in made(xs)] == expected == [True, *[False] * 5]
            assert not torch.is_grad_enabled()
    finally:
        torch.set_grad_enabled(True)
    with pytest.raises(TraceError, match=r"leaves torch\.set_grad_enabled changed"):
        model(forward, {"adaptive": False}, l=linear)(xs)
    assert torch.is_grad_enabled()
