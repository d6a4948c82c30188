"""Competitors must compute the same before they are timed: their outputs, and in training their gradients.

In: a contender's `outcome`, tensors by name. Out: the largest error over the tolerance, at most 1;
CorrectnessError beyond it, with competitor, tensor and place.

    check_outcome("fxbatch", {"loss": a}, {"loss": b})                 # 0.02
"""

from __future__ import annotations

from collections.abc import Mapping

import torch


class CorrectnessError(AssertionError):
    """A competitor computed something else than the reference."""


# Sums of some thousand float32 products: relative to the tensor's largest element.
RELATIVE = {torch.float32: 2e-4, torch.float64: 1e-9, torch.bfloat16: 5e-2, torch.float16: 2e-2}


def check_outcome(
    name: str,
    got: Mapping[str, torch.Tensor],
    wanted: Mapping[str, torch.Tensor],
    *,
    tolerance: float | None = None,
) -> float:
    """Compare a competitor's tensors with the reference's; the largest share of the tolerance used up.

    `tolerance` is relative to the largest absolute element of the reference's tensor (RELATIVE of its dtype
    where None). A competitor may leave a tensor out (a peer without gradients for it) but not all, and may
    not bring one that the reference lacks.
    """
    extra = [key for key in got if key not in wanted]
    if extra or not got:
        raise CorrectnessError(
            f"{name}: gives {extra[:3] or 'nothing'}, the reference has {list(wanted)[:3]}"
        )
    worst = 0.0
    for key, tensor in got.items():
        expected = wanted[key]
        if tensor.shape != expected.shape:
            raise CorrectnessError(
                f"{name}: {key} has shape {list(tensor.shape)}, expected {list(expected.shape)}"
            )
        if not expected.numel():
            continue
        allowed = tolerance if tolerance is not None else RELATIVE.get(expected.dtype, 0.0)
        scale = float(expected.abs().max()) or 1.0
        if allowed:
            share = _error(tensor, expected) / (scale * allowed)
        else:  # whole numbers, truth values
            share = 0.0 if torch.equal(tensor, expected) else float("inf")
        if not share <= 1:  # also NaN
            place = _place(tensor, expected)
            raise CorrectnessError(
                f"{name}: {key} differs from the reference by {share:.3g} times the tolerance "
                f"({allowed:g} of the largest element), most at {place}: got {float(tensor[place]):.6g}, "
                f"expected {float(expected[place]):.6g}"
            )
        worst = max(worst, share)
    return worst


def _error(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.detach().double().cpu() - b.detach().double().cpu()).abs().max())


def _place(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    error = (a.detach().double().cpu() - b.detach().double().cpu()).abs().nan_to_num(torch.inf)
    return tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
