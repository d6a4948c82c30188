"""The oracle comparison: batched against the loop, with a float64 run of the loop as referee.

    found = compare(runnable, instances)      # Comparison: what was compared, and the first differences
    found.differences == []

A batched tensor may be at most FACTOR times as far from the float64 result as the loop's own, plus a few
units in the last place of the largest number.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .run_target import Runnable, convert, tensors_of

FACTOR = 4.0
ULPS = 16.0


@dataclass
class Comparison:
    """What was compared; `differences` is empty where batched equals the loop."""

    values: int = 0
    gradients: int = 0
    referee: str = "float64"
    worst: float = 0.0  # largest error as a share of what is allowed
    differences: list[str] = field(default_factory=list)
    instances: list[int] = field(default_factory=list)  # that differ
    parameters: list[str] = field(default_factory=list)  # whose gradients differ


def compare(target: Runnable, instances: Sequence[Any], *, seed: int = 0) -> Comparison:
    """Values and gradients of the minibatch, against the loop."""
    found = Comparison()
    batched, batched_grads = _run(target, instances, True, seed)
    loop, loop_grads = _run(target, instances, False, seed)
    referee = _referee(target, instances, seed, found)
    exact, exact_grads = referee if referee is not None else (loop, loop_grads)
    if len(batched) != len(loop):
        found.differences.append(f"{len(batched)} results, the loop has {len(loop)}")
        return found
    for i, (b, e, r) in enumerate(zip(batched, loop, exact, strict=True)):
        for j, message in _differences(b, e, r, found):
            found.differences.append(f"instance {i}, tensor {j} of its result: {message}")
            if i not in found.instances:
                found.instances.append(i)
        found.values += len(e)
    for name, own in loop_grads.items():
        for _, message in _differences([batched_grads[name]], [own], [exact_grads[name]], found):
            found.differences.append(f"gradient of {name}: {message}")
            found.parameters.append(name)
        found.gradients += own is not None
    return found


def _run(
    target: Runnable, instances: Sequence[Any], batched: bool, seed: int
) -> tuple[list[list[torch.Tensor]], dict[str, torch.Tensor | None]]:
    """Tensors of each instance's result, and the gradients of the parameters, by name."""
    torch.manual_seed(seed)
    results = target.batched(instances) if batched else target.one_by_one(instances)
    tensors = [tensors_of(result) for result in results]
    parameters = dict(target.module.named_parameters()) if target.module is not None else {}
    wanted = {name: p for name, p in parameters.items() if p.requires_grad}
    losses = [t for one in tensors for t in one if t.requires_grad]
    grads: dict[str, torch.Tensor | None] = dict.fromkeys(wanted)
    if losses and wanted:
        weights = _weights(losses, seed)
        given = torch.autograd.grad(losses, list(wanted.values()), weights, allow_unused=True)
        grads = {name: None if g is None else g.detach() for name, g in zip(wanted, given, strict=True)}
    return [[t.detach() for t in one] for one in tensors], grads


def _weights(losses: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """Random gradients of the results, the same numbers in every precision."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.dtype).to(t.device)
        for t in losses
    ]


def _referee(
    target: Runnable, instances: Sequence[Any], seed: int, found: Comparison
) -> tuple[list[list[torch.Tensor]], dict[str, torch.Tensor | None]] | None:
    """The loop in float64; None, with the reason in `found.referee`, where it can't run so."""
    before = torch.get_default_dtype()
    try:
        if target.owner is None:
            found.referee = "the loop itself: the model is a function, whose tensors have no float64 copy"
            return None
        owner = copy.deepcopy(target.owner)
        if isinstance(owner, torch.nn.Module):
            owner.double()
        exact = convert(list(instances), _double)
        torch.set_default_dtype(torch.float64)
        return _run(Runnable(target.decorated, owner), exact, False, seed)
    except (RuntimeError, TypeError, AttributeError, pickle.PicklingError) as error:
        line = " ".join(str(error).split())
        found.referee = f"the loop itself: no float64 run ({type(error).__name__}: {line[:120]})"
        return None
    finally:
        torch.set_default_dtype(before)


def _double(t: torch.Tensor) -> torch.Tensor:
    if not t.dtype.is_floating_point:
        return t
    return t.detach().double().requires_grad_(t.requires_grad)


def _differences(
    batched: Sequence[torch.Tensor | None],
    loop: Sequence[torch.Tensor | None],
    exact: Sequence[torch.Tensor | None],
    found: Comparison,
) -> list[tuple[int, str]]:
    """(position, message) of each tensor that differs."""
    if len(batched) != len(loop):
        return [(0, f"{len(batched)} tensors, the loop has {len(loop)}")]
    out = []
    for j, (b, e, r) in enumerate(zip(batched, loop, exact, strict=True)):
        message, share = difference(b, e, r)
        found.worst = max(found.worst, share)
        if message:
            out.append((j, message))
    return out


def difference(
    batched: torch.Tensor | None, loop: torch.Tensor | None, exact: torch.Tensor | None
) -> tuple[str, float]:
    """(what differs, "" if nothing; error as a share of what is allowed)."""
    if batched is None or loop is None or exact is None:
        if (batched is None) == (loop is None):
            return "", 0.0
        zero = loop if loop is not None else batched
        if zero is not None and not zero.any():
            return "", 0.0  # no gradient and a gradient of zeros say the same
        return (
            f"{'no' if batched is None else 'a'} gradient, the loop has {'none' if loop is None else 'one'}",
            1.0,
        )
    if batched.shape != loop.shape or batched.dtype != loop.dtype:
        return f"{batched.dtype} {list(batched.shape)}, the loop has {loop.dtype} {list(loop.shape)}", 1.0
    if not loop.numel():
        return "", 0.0
    if not (loop.dtype.is_floating_point or loop.dtype.is_complex):
        return ("", 0.0) if torch.equal(batched, loop) else ("not equal", 1.0)
    wide = torch.complex128 if loop.dtype.is_complex else torch.float64
    b, e, r = (t.to(wide).cpu() for t in (batched, loop, exact))
    if not torch.equal(b.isnan(), e.isnan()) or not torch.equal(b.isinf(), e.isinf()):
        return "NaN or infinity in other places than the loop", 1.0
    finite = e.isfinite() & r.isfinite()
    b, e, r = b[finite], e[finite], r[finite]
    if not len(b):
        return "", 0.0
    scale = max(float(r.abs().max()), torch.finfo(loop.dtype).tiny)
    allowed = FACTOR * float((e - r).abs().max()) + ULPS * torch.finfo(loop.dtype).eps * scale
    error = float((b - r).abs().max())
    if error <= allowed:
        return "", error / allowed
    return (
        f"error {error:.3g}, allowed {allowed:.3g} (the loop's own {float((e - r).abs().max()):.3g})",
        error / allowed,
    )
