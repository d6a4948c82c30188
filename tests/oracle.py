"""The oracle: the undecorated forward, one instance at a time, judged with float64 as referee (`fxbatch.judge`).

check_equal(model, trees)                 # values and gradients, raises AssertionError where they differ
assert_launches(model, trees, 7)
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

import fxbatch
from fxbatch.judge import DRAWS, FACTOR, Draw, differences, doubled, largest_of, nudged, own_error
from fxbatch.torch_private import tree_flatten

Convert = Callable[[torch.Tensor], torch.Tensor]


def to_double(x: Any, memo: dict[int, Any] | None = None) -> Any:
    """A deep copy with float tensors in float64, complex in complex128; one object stays one object."""
    return converted(x, doubled, {} if memo is None else memo)


def converted(x: Any, convert: Convert, memo: dict[int, Any]) -> Any:
    """A deep copy with other tensors of floating point; one object stays one object."""
    if id(x) in memo:
        return memo[id(x)]
    if isinstance(x, torch.nn.Module):
        result: Any = copy.deepcopy(x)
        for t in (*result.parameters(), *result.buffers()):
            if t.dtype.is_floating_point or t.dtype.is_complex:
                t.data = convert(t.data)
    elif isinstance(x, torch.Tensor):
        result = convert(x) if x.dtype.is_floating_point or x.dtype.is_complex else x
    elif isinstance(x, (list, tuple)) and not hasattr(x, "_fields"):
        result = type(x)(converted(item, convert, memo) for item in x)
    elif isinstance(x, dict):
        result = {k: converted(v, convert, memo) for k, v in x.items()}
    elif hasattr(x, "__dict__") and not callable(x):
        result = copy.copy(x)
        memo[id(x)] = result
        for k, v in vars(x).items():
            object.__setattr__(result, k, converted(v, convert, memo))
    else:
        result = x
    memo[id(x)] = result
    return result


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
    drawn: Iterable[Draw] = (),
) -> None:
    """Raise AssertionError where `batched` is further from `exact` than eager's own error allows; drawn: eager and its
    float64 run on other numbers, since one tensor can be exact by chance.

    An eager that can't repeat itself, or goes another way in float64, is no oracle.
    """
    largest = max(map(largest_of, eager), default=0.0)
    coarsest = max(_coarsest(e) for e in [*eager, None])
    for i, (e, x) in enumerate(zip(eager, exact, strict=True)):
        cap = max(coarsest, _coarsest(e)) ** 0.5 * max(largest, largest_of(x))
        own = own_error(e, x)
        assert own <= cap, f"tensor {i}: eager is {own:.3g} from float64, more than {cap:.3g}: no oracle"
    drawn = itertools.chain([Draw(eager, exact)], drawn)
    for i, judged in differences(batched, eager, drawn, coarsest=coarsest).items():
        raise AssertionError(f"tensor {i}: {judged.message}")


def assert_same(batched: Any, eager: Any) -> None:
    """Raise AssertionError where tensors differ by more than rounding, without a float64 run."""
    ours, theirs = tree_flatten(batched), tree_flatten(eager)
    assert ours[1] == theirs[1], f"{ours[1]}, eager has {theirs[1]}"
    for i, judged in differences(ours[0], theirs[0]).items():
        raise AssertionError(f"tensor {i}: {judged.message}")


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
    model64 = _converted_model(model, doubled, memo) if model64 is None else model64
    args64 = to_double(list(args), memo)
    with fxbatch.disabled():
        eager = run(model, args, gradients=gradients)
        again = run(model, args, gradients=gradients)
        exact = run(model64, args64, gradients=gradients)
    try:
        compare(again, eager, exact)
    except AssertionError as error:
        raise AssertionError(f"the loop doesn't repeat itself: {error}") from None
    for _ in range(2):  # the second time with everything cached
        compare(
            run(model, args, gradients=gradients), eager, exact, draws_of(model, args, gradients=gradients)
        )


def draws_of(model: Callable[..., Any], args: Sequence[Any], *, gradients: bool = True) -> Iterator[Draw]:
    """The loop and its float64 run on parameters and instances that differ a little."""
    for seed in range(1, DRAWS):
        memo: dict[int, Any] = {}
        other = _converted_model(model, functools.partial(nudged, seed=seed), memo)
        inputs = converted(list(args), functools.partial(nudged, seed=seed), memo)
        memo = {}
        with fxbatch.disabled():
            exact = run(_converted_model(other, doubled, memo), to_double(inputs, memo), gradients=gradients)
            yield Draw(run(other, inputs, gradients=gradients), exact)


def _converted_model(model: Callable[..., Any], convert: Convert, memo: dict[int, Any]) -> Any:
    module = getattr(model, "__self__", None)
    if isinstance(model, torch.nn.Module):
        return converted(model, convert, memo)
    return (
        getattr(converted(module, convert, memo), model.__name__)
        if isinstance(module, torch.nn.Module)
        else model
    )


def assert_launches(model: Callable[..., Any], instances: Any, expected: int) -> None:
    """The minibatch takes exactly so many launches."""
    found = fxbatch.explain(model, instances).launches_after
    assert found == expected, f"{found} launches, expected {expected}"
