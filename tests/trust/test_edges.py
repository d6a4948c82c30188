"""Numbers at the edge: infinities, NaN, huge and subnormal numbers, zeros of both signs, through torch's functions:
values, gradients and what requires gradients are the loop's.

Of some functions torch itself gives two results at such numbers, one by its vectorised loops and one by those for what
is left over (`torch.fmod(1e30, inf)`, the gradient of `elu` at NaN): a batched result is then one of the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import fxbatch
from fxbatch.judge import Draw, differences, draws
from tests.trust.programs import model

inf, nan = math.inf, math.nan
NUMBERS = (
    0.0, -0.0, 1.0, -1.0, 0.5, -2.5, inf, -inf, nan, 1e30, -1e30, 3e38, -3e38, 1e-45, -1e-45, 1e-38, 89.0, -104.0, 7.0,
    -7.0,
)  # fmt: skip
Function = Callable[[Any, Any], Any]
POINTWISE: dict[str, Function] = {
    **{name: lambda x, y, name=name: getattr(x, name)() for name in (  # type: ignore[misc]  # the name is bound
        "sin", "cos", "tan", "exp", "log", "log1p", "expm1", "log2", "exp2", "sqrt", "rsqrt", "reciprocal", "neg",
        "abs", "sigmoid", "tanh", "relu", "sign", "floor", "round", "frac", "square", "erf", "asin", "atan", "acosh",
        "atanh", "sinh", "cosh", "lgamma", "logit", "nan_to_num",
    )},
    **{name: lambda x, y, name=name: getattr(F, name)(x) for name in (  # type: ignore[misc]
        "gelu", "silu", "elu", "leaky_relu", "softplus", "logsigmoid", "hardtanh", "mish", "softsign", "tanhshrink",
    )},
    **{name: lambda x, y, name=name: getattr(torch, name)(x, y) for name in (  # type: ignore[misc]
        "add", "sub", "mul", "div", "pow", "fmod", "remainder", "minimum", "maximum", "fmin", "fmax", "hypot", "atan2",
        "copysign", "xlogy", "logaddexp",
    )},
    "square root by power": lambda x, y: x**0.5, "cubic root": lambda x, y: x ** (1 / 3), "cube": lambda x, y: x**3,
    "power of two": lambda x, y: 2.0**x, "times infinity": lambda x, y: x * inf, "times zero": lambda x, y: x * 0.0,
    "by zero": lambda x, y: x / 0.0, "remainder of infinity": lambda x, y: x % inf,
    "remainder of a negative": lambda x, y: x % -2.5, "truncated": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "nothing taken away": lambda x, y: torch.sub(x, y, alpha=0), "clamp": lambda x, y: x.clamp(-1, 1),
    "clamp from below": lambda x, y: x.clamp(min=0.5), "clamp by NaN": lambda x, y: x.clamp(min=nan),
    "clamp by tensors": lambda x, y: x.clamp(y, y + 1), "clamp crosswise": lambda x, y: x.clamp(1, -1),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3), "lerp to the end": lambda x, y: torch.lerp(x, y, 1.0),
    "lerp by tensors": lambda x, y: torch.lerp(x, y, x), "addcmul": lambda x, y: torch.addcmul(x, x, y, value=0.5),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y, value=0.5), "where": lambda x, y: torch.where(x > 0, x.log(), y),
    "binary cross entropy of each": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid(), reduction="none"),
    "larger": lambda x, y: x > y, "equal": lambda x, y: x == y, "different": lambda x, y: x != y,
}  # fmt: skip
ROWS: dict[str, Function] = {
    **{name: lambda x, y, name=name: getattr(x.view(4, 5), name)(1) for name in (  # type: ignore[misc]
        "sum", "mean", "prod", "amax", "amin", "argmax", "logsumexp", "softmax", "log_softmax", "var", "std", "cumsum",
        "cummax", "logcumsumexp", "nansum", "nanmean", "median",
    )},
    "max and where": lambda x, y: tuple(x.view(4, 5).max(1)), "largest of a column": lambda x, y: x.view(4, 5).amax(0),
    "largest, kept": lambda x, y: x.view(4, 5).amax(1, keepdim=True),
    "two largest": lambda x, y: x.view(4, 5).topk(2)[0],
    "norm": lambda x, y: x.view(4, 5).norm(dim=1), "largest norm": lambda x, y: x.view(4, 5).norm(inf, dim=1),
    "normalize": lambda x, y: F.normalize(x.view(4, 5)), "layer_norm": lambda x, y: F.layer_norm(x.view(4, 5), (5,)),
    "dot": lambda x, y: x @ y, "dot with zeros": lambda x, y: x @ (y * 0),
    "product": lambda x, y: x.view(4, 5) @ y.view(5, 4),
    "cross entropy": lambda x, y: F.cross_entropy(x.view(4, 5), torch.tensor([0, 1, 2, 3])),
    "binary cross entropy": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    "l1": lambda x, y: F.l1_loss(x, y), "mse": lambda x, y: F.mse_loss(x, y), "huber": lambda x, y: F.huber_loss(x, y),
    "softmax of -inf": lambda x, y: x.masked_fill(x == x, -inf).masked_fill(x != x, -inf).softmax(0),
    "log_softmax of -inf": lambda x, y: torch.where(x.isnan() | (x == x), -inf, x).log_softmax(0),
    "logsumexp of -inf": lambda x, y: torch.where(x.isnan() | (x == x), -inf, x).logsumexp(0),
}  # fmt: skip
Leaves = list[Any]


def instances() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Three vectors of all numbers, in other orders, and three to go with them."""
    x = torch.tensor(NUMBERS)
    return (
        [x.roll(3 * k).requires_grad_() for k in range(3)],
        [x.roll(6 * k + 3).flip(0).requires_grad_() for k in range(3)],
    )


def leaves_of(results: Sequence[Any], inputs: Sequence[torch.Tensor]) -> Leaves:
    """All results, then the gradients of the inputs."""
    leaves = [t for r in results for t in (r if isinstance(r, tuple) else (r,))]
    ends = [t for t in leaves if t.requires_grad]
    if not ends:
        return leaves
    return [
        *leaves,
        *torch.autograd.grad(ends, inputs, [torch.ones_like(t) for t in ends], allow_unused=True),
    ]


def numbers_of(leaves: Leaves) -> list[Any]:
    """Each number by itself, so that a huge one excuses nothing; None for no gradient."""
    return [n for t in leaves for n in (t.reshape(-1).unbind() if t is not None else [None] * len(NUMBERS))]


def both(function: Function) -> tuple[Leaves, Leaves, list[torch.Tensor]]:
    """A function in a decorated forward, batched and as the loop, the second time."""
    made = model(lambda self, pair: function(pair[0] * 1.0, pair[1] * 1.0), out="list", adaptive=False)
    xs, ys = instances()
    pairs = list(zip(xs, ys, strict=True))
    with fxbatch.disabled():
        loop = leaves_of(made(pairs), [*xs, *ys])
    made(pairs)
    batched = leaves_of(made(pairs), [*xs, *ys])
    for ours, theirs in zip(batched, loop, strict=True):
        assert (ours is None or ours.requires_grad) == (theirs is None or theirs.requires_grad)
    return batched, loop, [*xs, *ys]


@pytest.mark.parametrize("name", POINTWISE)
def test_functions_of_single_numbers(name: str) -> None:
    batched, loop, inputs = both(POINTWISE[name])
    wrong = differences(numbers_of(batched), numbers_of(loop))
    if wrong:  # as torch's function has it of the stacked tensors
        x, y = (torch.stack(inputs[k : k + 3]).detach().requires_grad_() for k in (0, 3))
        leaves = leaves_of([POINTWISE[name](x * 1.0, y * 1.0)], [x, y])
        stacked = numbers_of([row for t in leaves for row in ([None] * 3 if t is None else t)])
        ours, theirs = numbers_of(batched), list(wrong)
        wrong = {
            theirs[i]: d
            for i, d in differences([ours[i] for i in wrong], [stacked[i] for i in wrong]).items()
        }
    assert not wrong, wrong
    results = [(a, b) for a, b in zip(batched[:3], loop[:3], strict=True) if a.is_floating_point()]
    for a, b in results:
        zeros = (a == 0) & (b == 0)
        assert torch.equal(a[zeros].signbit(), b[zeros].signbit())


@pytest.mark.parametrize("name", ROWS)
def test_functions_of_rows(name: str) -> None:
    """Sums of huge numbers are judged by their own error."""
    function = ROWS[name]
    batched, loop, inputs = both(function)

    def run(tensors: Sequence[torch.Tensor]) -> Leaves:
        return leaves_of(
            [function(x * 1.0, y * 1.0) for x, y in zip(tensors[:3], tensors[3:], strict=True)], tensors
        )

    assert not differences(batched, loop, draws(run, inputs))


def test_wrong_numbers_are_found() -> None:
    right = torch.tensor([1e30, 1.0, inf])
    for wrong in ([1e30, 1.0, nan], [1e30, 1.0, -inf], [1e30, 1.1, inf], [inf, 1.0, inf]):
        assert differences(numbers_of([torch.tensor(wrong)]), numbers_of([right]), [Draw([], [])])
