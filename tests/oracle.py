"""The oracle: the undecorated forward, one instance at a time, with float64 as referee.

check_equal(model, trees)                 # values and gradients, raises AssertionError where they differ
assert_launches(model, trees, 7)
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

import fxbatch
from fxbatch.torch_private import tree_flatten

FACTOR = 4.0  # the batched error may be this many times eager's own error (up to half of the digits) ...
ULPS = 16.0  # ... plus this many units in the last place of the largest value


def to_double(x: Any, memo: dict[int, Any] | None = None) -> Any:
    """A deep copy with float tensors in float64, complex in complex128; one object stays one object."""
    memo = {} if memo is None else memo
    if id(x) in memo:
        return memo[id(x)]
    if isinstance(x, torch.nn.Module):
        made: Any = copy.deepcopy(x).double()
        for t in (*made.parameters(), *made.buffers()):
            if t.dtype is torch.complex64:
                t.data = t.data.to(torch.complex128)
    elif isinstance(x, torch.Tensor):
        wide = {torch.complex64: torch.complex128}.get(x.dtype, torch.float64)
        made = x.detach().to(wide) if x.dtype.is_floating_point or x.dtype.is_complex else x
        made.requires_grad_(x.requires_grad) if made is not x else None
    elif isinstance(x, (list, tuple)) and not hasattr(x, "_fields"):
        made = type(x)(to_double(item, memo) for item in x)
    elif isinstance(x, dict):
        made = {k: to_double(v, memo) for k, v in x.items()}
    elif hasattr(x, "__dict__") and not callable(x):
        made = copy.copy(x)
        memo[id(x)] = made
        for k, v in vars(x).items():
            object.__setattr__(made, k, to_double(v, memo))
    else:
        made = x
    memo[id(x)] = made
    return made


def float_tensors(x: Any, found: dict[int, torch.Tensor] | None = None) -> list[torch.Tensor]:
    """The tensors in nested instances that require gradients, each once, in order."""
    found = {} if found is None else found
    if isinstance(x, torch.Tensor):
        if x.requires_grad:
            found.setdefault(id(x), x)
    elif isinstance(x, (list, tuple)):
        for item in x:
            float_tensors(item, found)
    elif isinstance(x, dict):
        for item in x.values():
            float_tensors(item, found)
    elif hasattr(x, "__dict__") and not callable(x) and not isinstance(x, torch.nn.Module):
        for item in vars(x).values():
            float_tensors(item, found)
    return list(found.values())


def run(
    model: Callable[..., Any], args: Sequence[Any], *, gradients: bool = True
) -> list[torch.Tensor | None]:
    """All tensors of the result, then the gradient of every parameter and differentiable input."""
    result = model(*args)
    tensors = [t for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor)]
    outputs: list[torch.Tensor | None] = [t.detach().clone() for t in tensors]
    if not gradients:
        return outputs
    module = getattr(model, "__self__", model)
    inputs = list(module.parameters()) if isinstance(module, torch.nn.Module) else []
    inputs = [p for p in inputs if p.requires_grad] + float_tensors(list(args))
    loss = sum(
        ((t * _weights(t)).sum().real if t.is_complex() else (t * _weights(t)).sum())
        for t in tensors
        if t.requires_grad
    )
    if not isinstance(loss, torch.Tensor) or not inputs:
        return outputs
    grads = torch.autograd.grad(loss, inputs, allow_unused=True)
    return outputs + [None if g is None else (g.to_dense() if g.is_sparse else g).detach() for g in grads]


def _weights(t: torch.Tensor) -> torch.Tensor:
    n = t.numel()
    return (
        (torch.arange(n, dtype=torch.float64, device=t.device).mul(0.7).sin() + 0.3).view(t.shape).to(t.dtype)
    )


def compare(
    batched: Sequence[torch.Tensor | None],
    eager: Sequence[torch.Tensor | None],
    exact: Sequence[torch.Tensor | None],
) -> None:
    """Raise AssertionError where `batched` is further from `exact` than eager's own error allows.

    Of eager's own error counts what half of the digits of the largest number of all are: one that can't repeat
    itself, or goes another way in float64, buys nothing.
    """
    assert len(batched) == len(eager) == len(exact), f"{len(batched)} tensors, eager has {len(eager)}"
    largest = max((_largest(e) for e in eager if e is not None), default=0.0)
    coarsest = max(_coarsest(e) for e in [*eager, None])
    for i, (b, e, x) in enumerate(zip(batched, eager, exact, strict=True)):
        if e is None or b is None:
            rest = b if e is None else e
            assert rest is None or not rest.any(), f"tensor {i}: one is None, the other {rest}"
            continue
        assert x is not None
        assert b.shape == e.shape, f"tensor {i}: shape {tuple(b.shape)}, eager {tuple(e.shape)}"
        assert b.dtype == e.dtype, f"tensor {i}: dtype {b.dtype}, eager {e.dtype}"
        if not b.numel():
            continue
        if not (b.dtype.is_floating_point or b.dtype.is_complex):
            assert torch.equal(b, e), f"tensor {i} differs: {b} against {e}"
            continue
        finite = torch.isfinite(e)
        assert torch.equal(torch.isfinite(b), finite), f"tensor {i}: infinities or nans differ"
        own = (e.to(x.dtype) - x)[finite].abs().max().item() if finite.any() else 0.0
        error = (b.to(x.dtype) - x)[finite].abs().max().item() if finite.any() else 0.0
        scale = x[finite].abs().max().item() if finite.any() else 0.0
        cap = max(largest, scale) * max(coarsest, torch.finfo(b.dtype).eps) ** 0.5
        assert own <= cap, f"tensor {i}: eager is {own:.3g} from float64, more than {cap:.3g}: no oracle"
        allowed = FACTOR * own + ULPS * torch.finfo(b.dtype).eps * max(scale, 1e-30)
        assert error <= allowed, (
            f"tensor {i}: error {error:.3g}, allowed {allowed:.3g} (eager's own: {own:.3g})"
        )


def compare_in_autocast(
    batched: Sequence[torch.Tensor | None], eager: Sequence[torch.Tensor | None], dtype: torch.dtype
) -> None:
    """As `compare`, where numbers were rounded to a coarser type on the way, in an order that may differ."""
    assert [None if t is None else t.dtype for t in batched] == [
        None if t is None else t.dtype for t in eager
    ]
    wide = [None if t is None else t.double() if t.is_floating_point() else t for t in eager]
    for i, (b, e) in enumerate(zip(batched, wide, strict=True)):
        if b is None or e is None or not b.is_floating_point() or not b.numel():
            compare([b], [e], [e])
            continue
        error, allowed = (b.double() - e).abs().max(), FACTOR * torch.finfo(dtype).eps * e.abs().max()
        assert error <= allowed, f"tensor {i}: error {error:.3g}, allowed {allowed:.3g}"


def _largest(t: torch.Tensor) -> float:
    if not t.numel() or not (t.is_floating_point() or t.is_complex()):
        return 0.0
    return t[torch.isfinite(t)].abs().max().item() if torch.isfinite(t).any() else 0.0


def _coarsest(t: torch.Tensor | None) -> float:
    """The unit in the last place of a tensor's type, or of what autocast computes in."""
    if t is None:
        return torch.finfo(torch.get_autocast_dtype("cpu")).eps if torch.is_autocast_enabled("cpu") else 0.0
    return torch.finfo(t.dtype).eps if t.is_floating_point() or t.is_complex() else 0.0


def check_equal(
    model: Callable[..., Any], *args: Any, gradients: bool = True, model64: Callable[..., Any] | None = None
) -> None:
    """The decorated call equals the undecorated loop, values and gradients, with float64 as referee. The loop runs
    twice: one that doesn't repeat itself is no oracle."""
    memo: dict[int, Any] = {}
    if model64 is None:
        module = getattr(model, "__self__", None)
        if isinstance(model, torch.nn.Module):
            model64 = to_double(model, memo)
        elif isinstance(module, torch.nn.Module):
            model64 = getattr(to_double(module, memo), model.__name__)
        else:
            model64 = model
    args64 = to_double(list(args), memo)
    with fxbatch.disabled():
        eager = run(model, args, gradients=gradients)
        again = run(model, args, gradients=gradients)
        exact = run(model64, args64, gradients=gradients)
    try:
        compare(again, eager, exact)
    except AssertionError as error:
        raise AssertionError(f"the loop doesn't repeat itself: {error}") from None
    compare(run(model, args, gradients=gradients), eager, exact)
    compare(run(model, args, gradients=gradients), eager, exact)  # and again, with everything cached


def assert_launches(model: Callable[..., Any], instances: Any, expected: int) -> None:
    """The minibatch takes exactly so many launches."""
    found = fxbatch.explain(model, instances).launches_after
    assert found == expected, f"{found} launches, expected {expected}"
