"""Several hundred odd forwards against the loop: each in one of the ways, in turn; each in every way with --slow.

All forwards are one model's, chosen by a shared argument: what they have in common is built once, and what one leaves
behind must not show in the next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import fxbatch
from fxbatch.judge import DRAWS, Draw, nudged
from fxbatch.torch_private import tree_flatten
from fxbatch.trace.state import current_recorder
from tests.oracle import compare, run, to_double
from tests.ordinary.forwards import EXPRESSIONS, FORWARDS, Parts

# What can't be recorded, and says so with the user's line: the error's beginning.
REFUSED = {
    "m.l(x).view(2, 2)[[[True, False], [False, True]]]": "TraceError: an index of nested lists of bools",
}

# Not equal yet: each is a fault that is known, with its cause. None is left out of the run: one that has become equal
# is told, so that it goes from here.
KNOWN: dict[str, str] = {}


@dataclass(frozen=True)
class Way:
    """How a minibatch is run."""

    name: str
    sizes: tuple[int, ...] = (2, 8, 8)
    train: bool = True
    grad: bool = True
    inference: bool = False
    traced: bool = False
    options: tuple[tuple[str, Any], ...] = ()


# Fusing builds a graph a forward, where without it forwards share those of the layers.
APART = (("fuse", False),)
WAYS = (
    Way("plain", sizes=(2, 8)),
    Way("one and none", sizes=(1, 0, 2, 1), options=APART),
    Way("eval", train=False, sizes=(8, 2), options=APART),
    Way("no_grad", grad=False, sizes=(2, 8, 8)),
    Way("inference", inference=True, grad=False, train=False, sizes=(8, 1)),
    Way("autograd", options=(("backward", "autograd"),)),
    Way("unrolled", options=(("mode", "unrolled"),)),
    Way("traced", traced=True, sizes=(2, 8), options=APART),
    Way("depth", options=(("schedule", "depth"), *APART)),
    Way("equal calls once", options=(("deduplicate", True), ("native", False), *APART)),
)


def decorated(**options: Any) -> type[nn.Module]:
    """Parts with a forward that is one of the table, by its number."""

    @fxbatch.autobatch(shared="which", out="list", **options)
    def forward(self: Any, x: Any, which: int) -> Any:
        return FORWARDS[which](self, x)

    return type("Decorated", (Parts,), {"forward": forward})


def model_of(way: Way) -> nn.Module:
    torch.manual_seed(0)
    return decorated(**dict(way.options))().train(way.train)


def instances(count: int) -> list[torch.Tensor]:
    """The same vectors each time; equal ones among them."""
    generator = torch.Generator().manual_seed(count)
    made = [torch.randn(4, generator=generator).requires_grad_() for _ in range(count)]
    return [*made[:-1], made[0].detach().clone().requires_grad_()] if count > 2 else made


def difference(model: nn.Module, model64: nn.Module, way: Way, which: int) -> str:
    """What differs from the loop, or "": values, numbers, structure, gradients."""
    for n, size in enumerate(way.sizes):
        xs = instances(size)
        with (
            torch.inference_mode() if way.inference else contextlib.nullcontext(),
            torch.set_grad_enabled(way.grad),
        ):
            with fxbatch.disabled():
                eager = outcome(model, xs, which, way)
                exact = exactly(model64, xs, which, way) or eager
                if [t.shape for t in exact[0] if t is not None] != [
                    t.shape for t in eager[0] if t is not None
                ]:
                    exact = eager  # it took another way in float64
            try:
                if way.traced:
                    data = fxbatch.TracedDataset(model, xs, which=which)
                    found = outcome(model, xs, which, way, given=[data[i] for i in range(size)])
                else:
                    found = outcome(model, xs, which, way)
                assert found[1:] == eager[1:], f"{found[1:]}, the loop has {eager[1:]}"
                compare(found[0], eager[0], exact[0], drawn(model, model64, way, which, xs))
            except Exception as error:  # noqa: BLE001  # told with the forward that raised it
                return f"call {n}, {size} instances: {type(error).__name__}: {str(error)[:200]}"
    return ""


def drawn(
    model: nn.Module, model64: nn.Module, way: Way, which: int, xs: Sequence[torch.Tensor]
) -> Iterator[Draw]:
    """The loop and its float64 run on vectors that differ a little."""
    for seed in range(1, DRAWS):
        others = [nudged(x, seed) for x in xs]
        with fxbatch.disabled():
            exact = exactly(model64, others, which, way)
            if exact is None:
                return
            yield Draw(outcome(model, others, which, way)[0], exact[0])


def exactly(model64: nn.Module, xs: Sequence[torch.Tensor], which: int, way: Way) -> Any:
    """The loop in float64; None where the forward fixes its types: then rounding only is allowed."""
    torch.set_default_dtype(torch.float64)
    try:
        return outcome(model64, to_double(list(xs)), which, way)
    except (RuntimeError, TypeError):
        return None
    finally:
        torch.set_default_dtype(torch.float32)


def outcome(
    model: nn.Module, xs: Sequence[torch.Tensor], which: int, way: Way, given: Any = None
) -> tuple[list[Any], list[Any], list[bool]]:
    """Tensors and gradients; structure with what is no tensor, rounded; and who carries gradients."""
    kept: list[Any] = []

    class Remembered(nn.Module):
        def forward(self, batch: Any) -> Any:
            kept.append(model(given) if given else model(batch, which))
            return kept[0]

    wrapped = Remembered()
    wrapped.model = model
    tensors = run(wrapped, [xs], gradients=way.grad)
    leaves, spec = tree_flatten(kept[0])
    plain = [round(x, 3) if isinstance(x, float) else x for x in leaves if not isinstance(x, torch.Tensor)]
    carry = [x.requires_grad for x in leaves if isinstance(x, torch.Tensor) and way.grad]
    return tensors, [str(spec), plain], carry


def failures(way: Way, numbers: Sequence[int]) -> dict[str, str]:
    """Forwards that differ; one that does so only after others says so."""
    model = model_of(way)
    model64, found = to_double(model), {}
    for which in numbers:
        message = difference(model, model64, way, which)
        refused = REFUSED.get(EXPRESSIONS[which])
        if refused and not message:
            found[f"{way.name}: {EXPRESSIONS[which]}"] = "is equal now: take it out of REFUSED"
        elif message and not (refused and f": {refused}" in message):
            alone = model_of(way)
            after = "" if difference(alone, to_double(alone), way, which) else " (after other forwards only)"
            found[f"{way.name}: {EXPRESSIONS[which]}"] = message + after
    return found


def assert_equal(way: Way, numbers: Sequence[int]) -> None:
    found = failures(way, numbers)
    known = {name for name in KNOWN if name.partition(": ")[0] == way.name}
    run_here = {f"{way.name}: {EXPRESSIONS[which]}" for which in numbers}
    mended = [f"{name} is equal now: take it out of KNOWN" for name in sorted(known & run_here - set(found))]
    new = [f"{name}: {message}" for name, message in found.items() if name not in known]
    assert not new and not mended, "\n".join(new + mended)


@pytest.mark.parametrize("way", range(len(WAYS)), ids=lambda i: WAYS[i].name)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_odd_forwards(way: int) -> None:
    assert_equal(WAYS[way], range(way, len(FORWARDS), len(WAYS)))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_forward_in_every_way(way: Way) -> None:
    assert_equal(way, range(len(FORWARDS)))


def test_a_wrong_forward_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is recorded it gives a little more than undecorated: a value, a gradient, a structure."""
    wrong = [
        lambda m, x: m.l(x) * (1.0 if current_recorder() is None else 1.0001),
        lambda m, x: m.l(x) + (m.k(x) - (m.k(x) if current_recorder() is None else m.k(x).detach())),
        lambda m, x: [m.l(x)] if current_recorder() is None else (m.l(x),),
        lambda m, x: (m.l(x), 1 if current_recorder() is None else 2),
    ]
    right = [lambda m, x: m.l(x) * 2]
    monkeypatch.setitem(globals(), "FORWARDS", wrong + right)
    assert list(failures(WAYS[0], range(5))) == [f"plain: {EXPRESSIONS[i]}" for i in range(4)]
