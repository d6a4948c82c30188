"""Values that outlive their call, in attributes, logs and hooks' lists, are tensors once it is over."""

from __future__ import annotations

import copy
import gc
import io
from typing import Any

import pytest
import torch
from torch import nn

import fxbatch
from fxbatch.errors import TraceError

KEPT: list[torch.Tensor] = []


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Any) -> Any:
        return self.b(self.a(x).tanh())


class Keeps(nn.Module):
    """Leaves values in an attribute, a list of its own, a dictionary and a global; where it waits for a value, in the
    global alone."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.tiny, self.out = Tiny(), nn.Linear(4, 2)
        self.last: Any = None
        self.log: list[Any] = []
        self.by_name: dict[str, list[Any]] = {"h": []}
        self.waits = False
        self.batched = fxbatch.autobatch(**{"adaptive": False, **options})(self.forward)

    def forward(self, x: Any) -> Any:
        h = self.tiny(x)
        if self.waits and h.sum() > -100:
            h = h * 2
        else:
            self.last = h
            self.log.append(h.sum())
            self.by_name["h"].append((h[0], h.detach()))
        KEPT.append(h[1:])
        return self.out(h)

    def everything(self) -> list[torch.Tensor]:
        found = [*KEPT] if self.waits else [self.last, *self.log, *KEPT]
        for pair in self.by_name["h"]:
            found += pair
        self.last = None
        self.log.clear(), self.by_name["h"].clear(), KEPT.clear()
        return found


def instances() -> list[torch.Tensor]:
    torch.manual_seed(1)
    return list(torch.randn(3, 4))


def gradients(model: nn.Module, found: list[torch.Tensor]) -> list[torch.Tensor]:
    model.zero_grad()
    torch.stack([t.square().sum() for t in found if t.requires_grad]).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("waits", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"backward": "autograd"}, {"mode": "unrolled"}, {"out": "list"}], ids=str
)
def test_they_are_as_the_loop_leaves_them(options: dict[str, Any], waits: bool) -> None:
    KEPT.clear()
    torch.manual_seed(0)
    model, xs = Keeps(**options), instances()
    model.waits = waits
    for _ in range(2):
        found = [*model.batched(xs), *model.everything()]
        with fxbatch.disabled():
            expected = [*model.batched(xs), *model.everything()]
        torch.testing.assert_close([t.clone() for t in found], expected)
        assert [t.requires_grad for t in found] == [t.requires_grad for t in expected]
        torch.testing.assert_close(gradients(model, found), gradients(model, expected))


def test_forward_hooks_collect_activations() -> None:
    model, xs = Keeps(), instances()
    seen: list[torch.Tensor] = []
    inputs: dict[str, Any] = {}
    model.tiny.a.register_forward_hook(lambda module, given, out: seen.append(out))
    model.out.register_forward_hook(lambda module, given, out: inputs.setdefault("out", []).append(given[0]))
    with torch.no_grad():
        model.batched(xs)
        found = [torch.stack(seen), torch.stack(inputs["out"])]
        seen.clear(), inputs.clear()
        with fxbatch.disabled():
            model.batched(xs)
        torch.testing.assert_close(found, [torch.stack(seen), torch.stack(inputs["out"])])
    model.everything()


def test_a_value_of_before_is_a_tensor_to_the_next_call() -> None:
    model, xs = Keeps(), instances()
    model.batched(xs)
    state = model.everything()[0]

    @fxbatch.autobatch(adaptive=False)
    def onward(x: Any) -> Any:
        return model.out(x + state) * state[:2] + torch.stack([state, x]).sum()

    found = onward(xs)
    with fxbatch.disabled():
        torch.testing.assert_close(found, onward(xs))


def test_it_does_what_tensors_do() -> None:
    model, xs = Keeps(), instances()
    model.batched(xs)
    h, *_ = model.everything()
    assert repr(h).startswith("tensor(") and h.grad_fn is not None and not h.is_leaf and h.is_contiguous()
    assert h.tolist() == [x.item() for x in h.detach()]
    file = io.BytesIO()
    torch.save(h.detach(), file)
    file.seek(0)
    torch.testing.assert_close(torch.load(file), h.detach())
    torch.testing.assert_close(copy.deepcopy(h.detach()), h.detach())
    h.retain_grad()
    h.sum().backward()
    torch.testing.assert_close(h.grad, torch.ones(4))


def test_objects_are_not_searched_where_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = []
    find = gc.get_referrers
    monkeypatch.setattr(gc, "get_referrers", lambda *x: searched.append(x) or find(*x))
    tiny = Tiny()

    @fxbatch.autobatch(adaptive=False, out="list")
    def plain(x: Any) -> Any:
        h = tiny(x)
        return {"h": h, "row": h[0], "rest": [h[1:].view(3, 1)]}

    for _ in range(3):
        plain(instances())
    assert searched == []


def test_what_a_failed_call_leaves_is_an_error_that_says_so() -> None:
    layer = nn.Linear(4, 4)
    kept: list[torch.Tensor] = []

    @fxbatch.autobatch(adaptive=False)
    def code(x: Any) -> Any:
        kept.append(layer(x))
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        code(instances())
    with pytest.raises(TraceError, match="finished call"):
        kept[0] + 1


def test_what_is_detached_wants_no_gradient_in_a_list() -> None:
    layer = nn.Linear(4, 4)
    for options in ({}, {"backward": "autograd"}, {"mode": "unrolled"}):

        @fxbatch.autobatch(out="list", adaptive=False, **options)
        def code(x: Any) -> Any:
            return layer(x), layer(x).detach()

        assert [t.requires_grad for pair in code(instances()) for t in pair] == [True, False] * 3


def test_tensors_that_a_forward_wrote_to_cost_no_search_among_all_objects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        @fxbatch.autobatch
        def forward(self, rows: list[torch.Tensor]) -> torch.Tensor:
            total = torch.zeros(3)
            for row in rows:
                total += self.layer(row)
            return total * 2

    searched: list[object] = []
    search = gc.get_referrers
    monkeypatch.setattr(gc, "get_referrers", lambda *x: searched.append(x) or search(*x))
    model, data = Sums(), [list(torch.randn(k, 3)) for k in (1, 3, 2)]
    expected = torch.stack([2 * sum(model.layer(row) for row in rows) for rows in data])
    torch.testing.assert_close(model(data), expected)
    assert not searched
