"""Every rule against the loop: values and gradients, at mixed sizes, 0 and 1 among them."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fxbatch.ragged.symbolic import NoPackedForm
from tests.ragged.against_loop import check_packed

torch.manual_seed(1)
W = torch.randn(8, 6)
B = torch.randn(8)
SQUARE = torch.randn(6, 6)
W36 = torch.randn(36)
SOME = [(3,), (5,), (1,), (4,), (7,)]
ALL = [*SOME, (0,)]
LONG = [(3,), (5,), (4,)]
PAIRS = [(3, 2), (5, 5), (1, 4), (4, 1), (2, 7), (3, 3)]
EMPTY_PAIRS = [*PAIRS, (0, 3)]


def rows(t: int) -> list[torch.Tensor]:
    return [torch.randn(t, 6)]


def two(t: int, s: int) -> list[torch.Tensor]:
    return [torch.randn(t, 6), torch.randn(s, 6)]


def indices(t: int) -> list[torch.Tensor]:
    return [torch.randint(8, (t,))]


def images(x: torch.Tensor) -> torch.Tensor:
    return x.view(len(x), 1, 2, 3)


def heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(len(x), 2, 3).transpose(0, 1)


def _offsets(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(x))[None] - torch.arange(len(x))[:, None]


def _written(x: torch.Tensor, where: Any, what: Any) -> torch.Tensor:
    y = x * 2
    y[where] = what
    return y.cos()


def _added(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y[1:] += x[:-1]
    y[:, 0] *= 3
    return y


Case = tuple[Callable[..., Any], list[tuple[int, ...]], tuple[torch.Tensor, ...]]
OF_ROWS: dict[str, Case] = {
    "pointwise": (lambda x: torch.relu(x) * 2 + 1, ALL, ()),
    "where": (lambda x: torch.where(x > 0, x, 0.0), ALL, ()),
    "in place": (lambda x: x.mul(2).add_(1).relu_(), ALL, ()),
    "linear": (F.linear, ALL, (W, B)),
    "layer norm": (lambda x, w, b: F.layer_norm(F.linear(x, w), (8,), b, b), ALL, (W, B)),
    "matmul": (lambda x, w: x @ w, ALL, (SQUARE,)),
    "parameter by columns": (lambda x, w: w @ x.t(), ALL, (SQUARE,)),
    "sum": (lambda x: x.sum(0), ALL, ()),
    "sum of all": (lambda x: x.sum(), ALL, ()),
    "sum of columns": (lambda x: x.sum(1), ALL, ()),
    "sum kept": (lambda x: x.sum(0, keepdim=True) + x, ALL, ()),
    "mean": (lambda x: x.mean(0), ALL, ()),
    "mean of all": (lambda x: x.mean(), ALL, ()),
    "amax": (lambda x: x.amax(0), SOME, ()),
    "amin": (lambda x: x.amin(0), SOME, ()),
    "amax with ties": (lambda x: (x > 0).double().mul(x.round()).amax(0), SOME, ()),
    "max": (lambda x: x.max(0), SOME, ()),
    "argmax": (lambda x: x.argmax(0), SOME, ()),
    "max of all": (lambda x: x.max() * x.min(), SOME, ()),
    "larger of two": (lambda x, w: torch.max(x, w[0]) + torch.min(x, x.mean(0)), ALL, (SQUARE,)),
    "powers of matrices": (lambda x: torch.linalg.matrix_power(x.t() @ x, 0) + x.sum(), SOME, ()),
    "product": (lambda x: x.prod(0), ALL, ()),
    "count": (lambda x: torch.count_nonzero(x > 0) * x.sum(0), ALL, ()),
    "running product": (lambda x: (1e30 * x).cumprod(0) * 1e-200, SOME, ()),
    "running extremes": (lambda x: (x.cummax(0), x.cummin(0)), SOME, ()),
    "running logsumexp": (lambda x: x.logcumsumexp(0), SOME, ()),
    "sort": (lambda x: (x.sort(0), x.sort(0, descending=True)[0]), ALL, ()),
    "sort with infinities": (lambda x: x.masked_fill(x > 0, float("-inf")).sort(0, descending=True)[1], ALL, ()),
    "argsort": (lambda x: x[x[:, 0].argsort()], ALL, ()),
    "topk": (lambda x: x.topk(1, 0), SOME, ()),
    "topk of columns": (lambda x: x.t().topk(1, 1, largest=False)[0], SOME, ()),
    "topk of half": (lambda x: x.topk((len(x) + 1) // 2, 0)[0], SOME, ()),
    "topk of a rounded share": (lambda x: x.t().topk(math.ceil(0.3 * len(x)))[0].sum(1), SOME, ()),
    "windows": (lambda x: (x.unfold(0, 2, 1), x.unfold(0, 2, 2).sum(0)), LONG, ()),
    "windows of columns": (lambda x: x.t().unfold(1, 3, 1).amax(-1), LONG, ()),
    "distances": (lambda x: torch.cdist(x, x[:2]) + torch.cdist(x, x).sum(1, keepdim=True), LONG, ()),
    "largest of neighbours": (
        lambda x: F.max_pool1d(x.t(), 2).sum(1) + F.max_pool1d(x.t()[None], 3, 1, 1)[0, :, 0], LONG, (),
    ),
    "largest of all rows": (
        lambda x: F.max_pool1d(x.t()[None], len(x)) + F.max_pool2d(x[None], (len(x), 1)).mT, SOME, (),
    ),
    "mean of all rows": (
        lambda x: F.avg_pool1d(x.t(), kernel_size=len(x)) + F.avg_pool2d(x[None], (len(x), 1)).mT, SOME, (),
    ),
    "bag, pooled": (lambda x: F.max_pool1d(x.view(len(x), 2, 3), 2).sum(0), ALL, ()),
    "padded to a length": (lambda x: F.pad(x, (0, 0, 0, 8 - len(x)), value=2.0), ALL, ()),
    "padded in front to a length": (lambda x: F.pad(x.t(), (8 - len(x), 0)), ALL, ()),
    "filled up to a length": (lambda x: torch.cat([x, x.new_zeros(8 - len(x), 6)]), [(5,), (5,), (3,)], ()),
    "pairs at indices": (lambda x: (x @ x.t())[torch.arange(len(x)), x.argmax(1) % len(x)], SOME, ()),
    "pairs written": (
        lambda x: (
            x.new_zeros(len(x), len(x)).index_put((torch.arange(len(x)), -torch.arange(len(x)) - 1), x[:, 0])
        ),
        SOME, (),
    ),
    "look-up of pairs": (
        lambda x, w: F.embedding(_offsets(x).clamp(-3, 3) + 3, w).sum(1) + x.sum(),
        ALL, (W,),
    ),
    "parameter at pairs": (
        lambda x, w: x @ x.t() + w[_offsets(x).abs().clamp(max=5)], ALL, (B,),
    ),
    "extremes of pairs": (
        lambda x: ((x @ x.t()).max(1)[0], (x @ x.t()).argmin(0), (x @ x.t()).min(0)[1]), SOME, ()
    ),
    "parts of a mask": (
        lambda x, w: (x @ x.t()).masked_fill(w[: len(x), : len(x)] > 0.5, -9.0).softmax(1) @ x, SOME,
        (torch.randn(9, 9),),
    ),
    "parts of scores": (
        lambda x: ((x @ x.t())[1:].sum(1), (x @ x.t())[:, :-1].exp(), (x @ x.t())[:-1, 1:].sin()), LONG, (),
    ),
    "scores with a place more": (
        lambda x: (F.pad(x @ x.t(), (1, 0, 1, 2), value=0.5).exp(), F.pad(x @ x.t(), (0, 1)).softmax(1)), ALL, (),
    ),
    "scores joined": (
        lambda x, w: (
            torch.cat([(x @ x.t()), (x @ w[:2].t()), -(x @ x.t())], 1).softmax(1),
            torch.cat([w[:1] @ x.t(), x @ x.t()]).cumsum(1),
        ),
        ALL, (SQUARE,),
    ),
    "linear on pairs": (
        lambda x, w: F.linear(x[:, None] - x[None], w).tanh() * (x @ x.t()).unsqueeze(-1), ALL, (W,)
    ),
    "norm of scores": (lambda x: (x @ x.t()).norm() * torch.linalg.vector_norm(x @ x.t()), SOME, ()),
    "heads of words": (
        lambda x: (
            F.cross_entropy(x @ x.t(), x.argmax(1) % len(x)),
            F.nll_loss((x @ x.t()).log_softmax(1), torch.where(x[:, 0] > 0, 0, -100), reduction="none"),
            F.cross_entropy(x.sum(1), x.sum(1).argmax()),
        ),
        SOME, (),
    ),
    "counts": (
        lambda x: x * torch.bincount(x.argmax(1) % len(x), minlength=len(x))[:, None]
        + (x.argmax(1) % 4).bincount(minlength=4).sum(), SOME, (),
    ),
    "norms along rows": (
        lambda x, b, w: (
            F.batch_norm(x.t()[None], b[:6].detach() * 0.1, b[:6].detach() ** 2, w[0], b[:6]),
        ),
        SOME, (B, SQUARE),
    ),
    "writes to columns": (lambda x: _written(x, (slice(None), slice(0, None, 2)), x[:, 1::2].sin()), SOME, ()),
    "writes to rows": (lambda x: _written(x, slice(1, None), x[:-1]), SOME, ()),
    "writes to a row": (lambda x: _written(_written(x, 0, x.sum(0)), -1, 2.0), SOME, ()),
    "writes to a corner": (lambda x: _written(x, (slice(None, 2), 3), 1.5), LONG, ()),
    "writes to every second row": (lambda x: _written(x, slice(None, None, 2), x.mean(0)), SOME, ()),
    "adds to a part": (_added, LONG, ()),
    "attention of parameters": (
        lambda x, w: (F.scaled_dot_product_attention(w[None], w[None], w[None])[0] @ x.t()).sum(1), SOME, (SQUARE,),
    ),
    "roll": (lambda x: x.roll(1, 0) * x.roll(-2, 0), ALL, ()),
    "bag of images": (
        lambda x, w: F.max_pool2d(F.conv2d(images(x), w.view(4, 1, 3, 3), padding=1), 2).sum(0),
        ALL, (W36,),
    ),
    "bag of sequences": (
        lambda x, w: F.avg_pool1d(F.conv1d(x.view(len(x), 1, 6), w.view(4, 1, 9)[..., :3]), 2),
        ALL, (W36,),
    ),
    "bag, normalised": (
        lambda x, w, b: F.group_norm(images(x).expand(-1, 4, 2, 3), 2, w, b),
        ALL, (torch.randn(4), torch.randn(4)),
    ),
    "bag, by running statistics": (
        lambda x, w, b: F.batch_norm(x, SQUARE[0].to(x.dtype), SQUARE[1].to(x.dtype).exp(), w, b),
        ALL, (torch.randn(6), torch.randn(6)),
    ),
    "bag, each by itself": (lambda x: F.instance_norm(images(x)), ALL, ()),
    "bag, padded": (lambda x: F.pad(images(x), (1, 1, 1, 0), mode="reflect").flatten(1), ALL, ()),
    "bag, enlarged": (
        lambda x: (F.interpolate(images(x), scale_factor=2, mode="bilinear"), F.interpolate(images(x), (4, 5))),
        SOME, (),
    ),
    "bag, sampled": (
        lambda x: F.grid_sample(images(x), x.view(len(x), 1, 3, 2).tanh(), align_corners=False), SOME, (),
    ),
    "bilinear": (lambda x, w: F.bilinear(x, x.sin(), w.view(1, 6, 6)), ALL, (W36,)),
    "gates without a tag": (lambda x, w: F.hardswish(1 - x) + F.logsigmoid(x) * F.prelu(x, w), ALL, (torch.rand(6),)),
    "repeat": (lambda x: x.repeat(1, 2), ALL, ()),
    "narrow": (lambda x: x.narrow(0, 1, len(x) - 1).sum(0), LONG, ()),
    "number as a bound": (lambda x: x.clamp(max=len(x) / 10), ALL, ()),
    "linear, mean": (lambda x, w, b: F.linear(x, w, b).mean(0), ALL, (W, B)),
    "linear, sum": (lambda x, w, b: F.linear(x, w, b).sum(0, keepdim=True) / len(x), ALL, (W, B)),
    "one value twice": (lambda x: (x.sum(0), x.sum(0)), ALL, ()),
    "any": (lambda x: (x > 0).any(0), ALL, ()),
    "all": (lambda x: (x > 0).all(0), ALL, ()),
    "logsumexp": (lambda x: x.logsumexp(0), SOME, ()),
    "softmax over rows": (lambda x: x.softmax(0), ALL, ()),
    "log softmax over rows": (lambda x: x.log_softmax(0), ALL, ()),
    "softmax by rows": (lambda x: x.softmax(1), ALL, ()),
    "running sum": (lambda x: x.cumsum(0), ALL, ()),
    "flip": (lambda x: x.flip(0), ALL, ()),
    "norm": (lambda x: x.norm(dim=0), SOME, ()),
    "len in arithmetic": (lambda x: x.sum(0) / len(x) * x.shape[0] ** 0.5, SOME, ()),
    "contraction over rows": (lambda x: x.t() @ x, ALL, ()),
    "scores": (lambda x: (x @ x.t()).softmax(-1) @ x, SOME, ()),
    "attention pooling": (lambda x, w: ((x @ w).sum(1).softmax(0).unsqueeze(1) * x).sum(0), SOME, (SQUARE,)),
    "heads": (lambda x: heads(x).reshape(2, -1).sum(1), ALL, ()),
    "size times heads": (lambda x: x.view(len(x) * 2, 3), ALL, ()),
    "flattened": (lambda x: x.reshape(-1), ALL, ()),
    "flattened and back": (lambda x: x.view(len(x) * 2, 3).view(len(x), 6) + x, ALL, ()),
    "first": (lambda x: x[0], SOME, ()),
    "last": (lambda x: x[-1], SOME, ()),
    "differences": (lambda x: x[1:] - x[:-1], SOME, ()),
    "first two": (lambda x: x[:2].sum(0), [(2,), (4,), (3,)], ()),
    "every second": (lambda x: x[::2].sum(0), SOME, ()),
    "a row in front": (lambda x, b: torch.cat([b[None, :6], x]), ALL, (B,)),
    "columns joined": (lambda x: torch.cat([x, x * 2], 1), ALL, ()),
    "stack": (lambda x: torch.stack([x, x * 2], 1), ALL, ()),
    "zeros and ones": (lambda x: x + torch.zeros(len(x), 6, dtype=x.dtype) + torch.ones_like(x), ALL, ()),
    "positions": (lambda x, w: x + w[: len(x)], ALL, (W,)),
    "arange": (lambda x: x * torch.arange(len(x)).unsqueeze(1), ALL, ()),
    "padding by rows": (lambda x: F.pad(x, (0, 0, 1, 2)), ALL, ()),
    "padding by columns": (lambda x: F.pad(x, (1, 0)), ALL, ()),
    "triangle": (lambda x: torch.ones(len(x), len(x)).tril().sum(1, dtype=x.dtype) + x.sum(1), ALL, ()),
    "expand": (lambda x: x.sum(0).expand(len(x), 6) + x, ALL, ()),
    "chunk": (lambda x: x.chunk(2, 1)[0], ALL, ()),
    "causal attention": (
        lambda x: F.scaled_dot_product_attention(heads(x), heads(x), heads(x), is_causal=True), ALL, ()
    ),
}  # fmt: skip
# One operator of theirs runs instance by instance: as many as the instance says, or rows of two sizes of their own.
ALONE = {
    "topk of half", "topk of a rounded share", "scores with a place more", "pairs at indices",
    "pairs written", "norm of scores",
}  # fmt: skip
OF_PAIRS: dict[str, Case] = {
    "two sizes": (lambda a, b: (a @ b.t()).softmax(-1) @ b, EMPTY_PAIRS, ()),
    "nothing to attend": (lambda a, b: (a @ b.t()).softmax(-1) @ b, [*PAIRS, (3, 0)], ()),
    "additive scores": (
        lambda a, b, w: (torch.tanh(a.unsqueeze(1) + b.unsqueeze(0)) @ w).sum(-1).softmax(1) @ b, PAIRS, (SQUARE,)
    ),
    "logarithms of products": (lambda a, b: (a.unsqueeze(1).exp() * b.exp()).log().sum(1).sum(0), PAIRS, ()),
    "attention": (
        lambda a, b: F.scaled_dot_product_attention(a[None], b[None], b[None])[0], [*PAIRS, (2, 0), (0, 0)], ()
    ),
    "means over each": (lambda a, b: ((a @ b.t()).mean(1).sum(0), (a @ b.t()).mean(0).sum(0)), PAIRS, ()),
    "mean over both": (lambda a, b: (a @ b.t()).mean(), PAIRS, ()),
    "extremes over each": (lambda a, b: ((a @ b.t()).amax(1).sum(0), (a @ b.t()).amin(0).sum(0)), PAIRS, ()),
    "rows joined": (lambda a, b: torch.cat([a, b, a]), EMPTY_PAIRS, ()),
    "three dimensions": (lambda a, b: a.unsqueeze(1) * b, PAIRS, ()),
    "distances": (lambda a, b: (torch.cdist(a, b).amin(1), torch.cdist(a, b, p=1).min(0)[0]), PAIRS, ()),
    "best of the other": (lambda a, b: (b[(a @ b.t()).argmax(1)] - a, (a @ b.t()).max(0)[0]), PAIRS, ()),
    "bilinear": (lambda a, b, w: torch.einsum("td,de,se->ts", a, w, b), [(3, 2), (5, 4), (2, 7)], (SQUARE,)),
}  # fmt: skip


@pytest.mark.parametrize("what", ["values", "gradients"])
def test_a_body_that_is_traced_as_another_is_told(what: str) -> None:
    traced: list[int] = []

    def body(x: torch.Tensor) -> torch.Tensor:
        traced.append(1)
        if len(traced) > 1:
            return x * 2
        return x * 3 if what == "values" else x.detach() * 2 + 0 * x

    with pytest.raises(AssertionError):
        check_packed(body, rows, SOME, ((0,),))


@pytest.mark.parametrize("name", OF_ROWS)
def test_rows(name: str) -> None:
    body, sizes, shared = OF_ROWS[name]
    function = check_packed(body, rows, sizes, ((0,),), shared)
    assert bool(function.lowered.alone) == (name in ALONE), function.lowered.source


@pytest.mark.parametrize("name", OF_PAIRS)
def test_two_sizes(name: str) -> None:
    body, sizes, shared = OF_PAIRS[name]
    function = check_packed(body, two, sizes, ((0,), (0,)), shared)
    assert not function.lowered.alone, function.lowered.source


def test_two_results_are_two_tensors() -> None:
    function = check_packed(lambda x: (x.sum(0), x.sum(0)), rows, SOME, ((0,),))
    columns = [[x] for x in rows(3)]
    (a, b), _ = function(columns, [], function.columns_of(columns), torch.device("cpu"))
    assert a.data_ptr() != b.data_ptr()


def test_an_extreme_of_no_rows_is_an_error() -> None:
    function = check_packed(lambda x: x.max(0), rows, SOME, ((0,),))
    columns = [[torch.randn(3, 6).double(), torch.randn(0, 6).double()]]
    with pytest.raises(IndexError, match="no extreme"):
        function(columns, [], function.columns_of(columns), torch.device("cpu"))


def test_second_derivatives_of_extremes() -> None:
    function = check_packed(lambda x: x.amax(0).square(), rows, SOME, ((0,),))
    given = [torch.randn(t, 6).double().requires_grad_() for t in (3, 5)]
    (out,), _ = function([given], [], function.columns_of([given]), torch.device("cpu"))
    loop = torch.stack([x.amax(0).square() for x in given])
    for a, b in zip(*[_second(made, given) for made in (out, loop)], strict=True):
        torch.testing.assert_close(a, b)


def _second(made: torch.Tensor, given: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    first = torch.autograd.grad(made.square().sum(), given, create_graph=True)
    return torch.autograd.grad(sum(g.square().sum() for g in first), given)  # type: ignore[arg-type]


def test_unit_matrices() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return (x @ x.t() + 2 * torch.eye(len(x), dtype=x.dtype)).sum(1) @ (x @ torch.eye(6, dtype=x.dtype))

    assert not check_packed(body, rows, SOME, ((0,),)).lowered.alone


def test_the_same_code_is_written_once_and_memory_freed() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return x.t().t().sum(0) + x.t().t().mul(2).sum(0) + x.flip(0).sum(0) + x.flip(0).mul(3).sum(0)

    source = check_packed(body, rows, SOME, ((0,),)).lowered.source
    assert source.count("reversed") == 1
    assert "= None" in source


def test_look_up() -> None:
    assert not check_packed(lambda i, w: F.embedding(i, w).sum(0), indices, ALL, ((0,),), (W,)).lowered.alone


def test_last_dimension() -> None:
    make = lambda t: [torch.randn(6, t)]  # noqa: E731
    assert not check_packed(lambda x: x.softmax(-1).sum(0), make, ALL, ((1,),)).lowered.alone


def test_attention_bias_of_two_sizes() -> None:
    make = lambda t: [torch.randn(t, 6), torch.randn(t, t)]  # noqa: E731
    body = lambda a, m: F.scaled_dot_product_attention(a[None], a[None], a[None], attn_mask=m)[0]  # noqa: E731
    assert not check_packed(body, make, SOME, ((0,), (0, 1))).lowered.alone


def test_no_rule_runs_instance_by_instance() -> None:
    function = check_packed(lambda x: x.median(0), rows, [(3,), (4,)], ((0,),))
    assert [name for name, _ in function.lowered.alone.values()] == ["aten.median.dim"]


def test_views_of_what_was_made_contiguous_run_instance_by_instance() -> None:
    """`contiguous()` says nothing about packed rows; a view of an instance's own tensor needs it."""
    function = check_packed(lambda x: x.t().contiguous().view(-1)[:2], rows, LONG, ((0,),))
    assert [name for name, _ in function.lowered.alone.values()] == ["aten.view.default"]
    check_packed(lambda x: (x @ x.t()).t().contiguous().view(-1).sum(), rows, LONG, ((0,),))


def test_a_loop_over_a_size_is_refused() -> None:
    with pytest.raises(NoPackedForm, match="plain number"):
        check_packed(lambda x: sum(x[i] for i in range(len(x))), rows, SOME, ((0,),))


def test_a_branch_on_a_size_is_a_guard() -> None:
    body = lambda x: x.sum(0) if len(x) > 3 else x.sum(0) * 2  # noqa: E731
    check_packed(body, rows, [(5,), (9,)], ((0,),))
    with pytest.raises(AssertionError, match="not for"):
        check_packed(body, rows, [(5,), (3,)], ((0,),))


def test_one_index_out_of_range_does_not_read_the_next_instance() -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        return x[torch.full((1,), 4)]

    with pytest.raises(IndexError):
        check_packed(body, rows, [(6,), (3,), (5,)], ((0,),))


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sign()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


def hooked(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    y.register_hook(lambda g: g * 0)
    return y.sum(0)


def written_through_data(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    y.data[0] = 0.0
    return y.sum(0)


def written_through_a_view(x: torch.Tensor) -> torch.Tensor:
    y = x * 1
    first = y[0]
    y[0] = 0.0
    return y.sum(0) + first


LOST: dict[str, tuple[Callable[..., Any], str]] = {
    "own derivatives": (lambda x: Straight.apply(x).sum(0) * x.sum(0), "derivatives of its own"),
    "hook": (hooked, "register_hook"),
    "write through data": (written_through_data, "writes to a tensor"),
    "write through a view": (written_through_a_view, "writes to a tensor"),
    "write of another type": (lambda x: x.float().add_(x.double()).sum(0), "writes to a tensor"),
    "mask": (lambda x: x[x > 0].sum(), "a size"),
    "value as a number": (lambda x: x * x.sum().item(), "a size"),
    "memory": (lambda x: x.as_strided((2, 2), (1, 1)), "memory"),
}


@pytest.mark.parametrize("name", LOST)
def test_what_a_graph_would_lose_is_refused(name: str) -> None:
    body, reason = LOST[name]
    with pytest.raises(NoPackedForm, match=reason):
        check_packed(lambda x: body(x + 0.0), rows, [(3,), (5,)], ((0,),))


def without_gradient(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = x * 2
    return (y * x).sum(0)


KEPT: dict[str, Callable[..., Any]] = {
    "data": lambda x: (x.data * x).sum(0),
    "copied": lambda x: torch.zeros_like(x).copy_(x.flip(0)).sum(0),
    "no_grad": without_gradient,
    "detach": lambda x: (x.detach() * x).sum(0),
    "repeat": lambda x: x.repeat(2, 1),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 0),
    "roll": lambda x: x.roll(1, 0),
    "mean of scores": lambda x: (x @ x.t()).mean(1),
    "diagonal of scores": lambda x: (x @ x.t()).diagonal() + (x @ x.t()).diag().sum(),
    "scores without themselves": lambda x: (
        (x @ x.t()).masked_fill(torch.eye(len(x), dtype=torch.bool), 0).sum(1)
    ),
    "distances in scores": lambda x: (
        (x @ x.t() - (torch.arange(len(x))[:, None] - torch.arange(len(x))[None]).abs()).softmax(1) @ x
    ),
    "nearest": lambda x: (
        *torch.cdist(x, x).topk(2, 1, largest=False),
        (x @ x.t()).topk(3, 0)[0],
        (x[:, None] * x[None]).topk(2, 1)[0],
    ),
    "pairs in a row": lambda x: (
        (x @ x.t()).flatten().log_softmax(0).view(len(x), len(x)),
        (x[:, None] * x[None]).reshape(-1, 6).cumsum(0),
        (x[None] - x[:, None]).flatten(0, 1).sum(0),
    ),
    "columns and rows of scores": lambda x: (
        torch.cat([x @ x.t(), x[:, :1]], 1),
        F.pad(x @ x.t(), (1, 0, 0, 2)),
        (x @ x.t())[1:, :-1],
    ),
    "half of the rows": lambda x: x.topk(len(x) // 2, 0)[0] + torch.full((6,), len(x)),
    "classes of columns": lambda x: F.cross_entropy(
        SQUARE.to(x) @ x.t(), x.argmax(0) % len(x), reduction="sum"
    ),
    "std of equal rows": lambda x: (x * 0).std(0, correction=0),
    "variance and mean": lambda x: (*torch.var_mean(x, 0, unbiased=False), x.std(0, keepdim=True)),
    "no dimension flipped": lambda x: x.flip(()),
    "repeated in both": lambda x: x.repeat(3, 2) + x.repeat(2, 3, 2)[1],
    "repeated never": lambda x: (x.repeat(0, 2).sum(0), x.repeat(2, 0, 1).sum(1), x.sum(0)),
    "norms of scores": lambda x: (x @ x.t()).norm(dim=1) + torch.linalg.vector_norm(x @ x.t(), 3, 0),
    "norm of equal rows": lambda x: (x * 0).norm(dim=0) + torch.linalg.vector_norm(x, 3, 0),
    "filled diagonal": lambda x: (x @ x.t()).fill_diagonal_(2.0).logsumexp(1),
    "diagonal twice": lambda x: (x @ x.t()).fill_diagonal_(2.0).fill_diagonal_(0.5).sum(0),
    "norms of groups along rows": lambda x: (
        F.group_norm(x.t()[None], 3),
        F.group_norm(x.view(len(x), 2, 3).permute(1, 2, 0), 1),
        F.instance_norm(x.t()[None], weight=SQUARE[0].to(x), bias=SQUARE[1].to(x)),
    ),
    "spectra": lambda x: torch.view_as_real(torch.fft.rfft(x)).sum((0, 2)) + torch.fft.ifft(x).real[0, :4],
    "parts": lambda x: F.adaptive_avg_pool1d(x.t()[None], 4) + F.adaptive_max_pool1d(x.t()[None], 4),
    "matrices": lambda x: torch.linalg.inv(x.view(-1, 2, 3)[..., :2] + 9 * torch.eye(2, dtype=x.dtype)).sum(
        0
    ),
    "determinants": lambda x: torch.linalg.det(x.view(-1, 2, 3)[..., :2] + torch.eye(2, dtype=x.dtype)),
    "row of scores": lambda x: (x @ x.t())[len(x) // 2] + (x @ x.t())[:, len(x) - 2],
    "place in a fixed row": lambda x: x[0][len(x) - 1] + x.sum(0)[len(x) // 2],
    "attention of items": lambda x: F.scaled_dot_product_attention(*[x.view(-1, 1, 2, 3)] * 3).sum((0, 1)),
    "written powers": lambda x: (x.abs() + 1).pow_(-0.5).sum(0),
    "bits": lambda x: (x[:, 0] > 0) & (x[:, 1] > 0) | (x[:, 2] > 1),
    "levels": lambda x: (x[:, :1] - torch.linspace(0, 1, 6, dtype=x.dtype)).exp().sum(0),
}


@pytest.mark.parametrize("name", KEPT)
def test_further_bodies(name: str) -> None:
    check_packed(KEPT[name], rows, [(3,), (5,), (4,)], ((0,),))


def test_no_builtin_is_replaced_while_a_body_is_traced() -> None:
    """`len(x)` gives a size there by a name among the globals of the body's own module, and only meanwhile."""
    plain, untouched = (builtins.len, builtins.max, builtins.min), []

    def body(x: torch.Tensor) -> torch.Tensor:
        untouched.append((builtins.len, builtins.max, builtins.min) == plain)
        return x * max(len(x), 1)

    check_packed(body, lambda n: [torch.randn(n, 3)], [(2,), (5,), (3,)], ((0,),))
    assert all(untouched) and "len" not in globals() and "max" not in globals()
