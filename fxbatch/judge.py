"""Whether two ways of computing give the same tensors, with float64 as referee: the one rule of the project.

In: the leaves of what was computed in another way, those of the reference ("the loop"), and the reference in float64.
Out: for each leaf what differs, or "".

    difference(batched, loop, exact)                               # one leaf: a Judged
    differences(batched, loop, draws(run, tensors))                # many: {position: Judged} of those that differ

What is compared may be FACTOR times as far from the float64 run as the reference's own, which counts up to half of the
digits of its type, and a few units in the last place of its largest number. A number can be exact by chance, so before
a leaf is refused the error of the reference is drawn a few times more, on tensors that differ a little.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode

from fxbatch.torch_private import QuietDispatchMode

FACTOR = 4.0
ULPS = 16.0
DRAWS = 4  # of the reference's error, the first on the tensors that are compared
_APART = 2.0**-10  # by how much of itself a number differs in further draws
_PIECE = 1 << 18  # elements that are compared at once: the memory does not grow with the tensors


class Judged(NamedTuple):
    """The result of a comparison: a message that names the difference ("" if there is none), the error as a share of
    the error that is allowed, and whether numbers differ (not types or structure)."""

    message: str = ""
    share: float = 0.0
    numbers: bool = True


class Draw(NamedTuple):
    """The leaves of the reference, and those that it has in float64; the eps of the coarsest type that it computed
    in, as autocast or the code itself said."""

    loop: Sequence[Any]
    exact: Sequence[Any]
    coarsest: float = 0.0


EQUAL = Judged()
Tensors = Sequence[torch.Tensor]


# -- one leaf ---------------------------------------------------------------------------------------


def difference(
    batched: Any,
    loop: Any,
    exact: Any = None,
    *,
    own: float = 0.0,
    largest: float = 0.0,
    coarsest: float = 0.0,
) -> Judged:
    """How one leaf of a result, or one gradient, differs from the loop's.

    exact: the same from the loop in float64. own: the loop's error in other tensors of the kind, for one of few
    numbers may be exact by chance. largest: the largest number of all that is compared, coarsest: the eps
    of the coarsest type that was computed in; the loop's own error counts up to sqrt(eps) of the largest number, so
    that an irreproducible loop buys no error.
    """
    if not isinstance(loop, torch.Tensor) or not isinstance(batched, torch.Tensor):
        return _plain_difference(batched, loop)
    if batched.layout is not loop.layout:
        return Judged(f"{batched.layout}, the loop has {loop.layout}", math.inf, False)
    if batched.shape != loop.shape or batched.dtype != loop.dtype:
        text = f"{batched.dtype} {list(batched.shape)}, the loop has {loop.dtype} {list(loop.shape)}"
        return Judged(text, math.inf, False)
    if not loop.numel():
        return EQUAL
    referees = [exact] if isinstance(exact, torch.Tensor) and exact.shape == loop.shape else []
    b, e, *exacts = on_common_rows(batched.detach(), loop.detach(), *(t.detach() for t in referees))
    if not (e.dtype.is_floating_point or e.dtype.is_complex):
        return EQUAL if torch.equal(b, e) else Judged("not equal", math.inf)
    errors = _Errors.of(b, e, *exacts)
    if isinstance(errors, str):
        return Judged(errors, math.inf)
    return errors.judged(torch.finfo(e.dtype), own, largest, coarsest)


class _Errors(NamedTuple):
    """Of the finite numbers: the largest sizes and the largest distances."""

    loop: float = 0.0  # the largest number of the loop ...
    exact: float = 0.0  # ... and of the float64 run
    from_loop: float = 0.0  # how far the batched numbers are from the loop's ...
    from_exact: float = 0.0  # ... and from the float64 run's
    own: float = 0.0  # how far the loop's are from the float64 run's
    referee: bool = False  # whether there was a float64 run ...
    finer: bool = False  # ... and the loop is not in float64 itself

    @staticmethod
    def of(b: torch.Tensor, e: torch.Tensor, r: torch.Tensor | None = None) -> _Errors | str:
        """The errors; a text where NaN or infinities differ."""
        parts = []
        for piece in zip(*(t.reshape(-1).split(_PIECE) for t in (b, e, r) if t is not None), strict=True):
            wide = [_wide(t).cpu() for t in piece]
            x, y = wide[:2]
            if not torch.equal(x.isnan(), y.isnan()) or not torch.equal(x.isinf(), y.isinf()):
                return "NaN or infinity in other places than the loop"
            infinite = y.isinf()
            if not torch.equal(x[infinite], y[infinite]):
                return "infinity of another sign than the loop's"
            finite = y.isfinite() if r is None else y.isfinite() & wide[2].isfinite()
            x, y, *z = (t[finite] for t in wide)
            apart = [y, *z, x - y, *(x - t for t in z), *(y - t for t in z)]
            parts.append([float(t.abs().max()) if t.numel() else 0.0 for t in apart])
        columns = [max(column) for column in zip(*parts, strict=True)]
        if r is None:
            return _Errors(loop=columns[0], from_loop=columns[1])
        loop, exact, from_loop, from_exact, own = columns
        return _Errors(
            loop, exact, from_loop, from_exact, own, True, e.dtype not in (torch.float64, torch.complex128)
        )

    def judged(self, kind: torch.finfo, others: float, largest: float, coarsest: float) -> Judged:
        cap = math.sqrt(max(kind.eps, coarsest)) * max(largest, self.loop, kind.tiny)
        by_exact = self.referee and self.own <= cap  # farther from the loop it took another way
        size, error = (self.exact, self.from_exact) if by_exact else (self.loop, self.from_loop)
        rounding = ULPS * kind.eps * max(size, kind.tiny)
        allowed = FACTOR * min(max(self.own, others, 0.0 if self.finer else rounding), cap) + rounding
        if error <= allowed:
            return Judged("", error / allowed)
        about = f"the loop's own {self.own:.3g}" if self.referee else "no float64 run"
        if others > self.own:
            about += f", {others:.3g} in others of its kind"
        if self.own > cap:
            about += f", counted up to {cap:.3g}"
        return Judged(f"error {error:.3g}, allowed {allowed:.3g} ({about})", error / allowed)


def own_error(loop: Any, exact: Any) -> float:
    """How far a leaf of the loop's result is from that in float64; 0 where that can't be told."""
    if not isinstance(loop, torch.Tensor) or not isinstance(exact, torch.Tensor) or loop.shape != exact.shape:
        return 0.0
    if not (loop.is_floating_point() or loop.is_complex()):
        return 0.0
    e, r = on_common_rows(loop.detach(), exact.detach())
    pieces = zip(e.reshape(-1).split(_PIECE), r.reshape(-1).split(_PIECE), strict=True)
    return max((largest_of(x.to(y.dtype) - y) for x, y in pieces), default=0.0)


def largest_of(leaf: Any) -> float:
    """The largest finite size of a number in it; 0 of what has none."""
    if not isinstance(leaf, torch.Tensor) or not (leaf.is_floating_point() or leaf.is_complex()):
        return 0.0
    leaf = leaf.detach().coalesce().values() if leaf.is_sparse else dense(leaf)
    sizes = leaf.abs()
    sizes = sizes[sizes.isfinite()]
    return float(sizes.max()) if sizes.numel() else 0.0


def _plain_difference(batched: Any, loop: Any) -> Judged:
    """Leaves of which one at least is no tensor."""
    if batched is loop:
        return EQUAL
    one = loop if batched is None else batched
    if (batched is None or loop is None) and isinstance(one, torch.Tensor):
        if not (one.detach().coalesce().values() if one.is_sparse else dense(one)).any():
            return EQUAL  # no gradient and a gradient of zeros say the same
        return Judged("None" if batched is None else "not None, as the loop's is", math.inf)
    if type(batched) is not type(loop):
        return Judged(f"{type(batched).__name__}, the loop has {type(loop).__name__}", math.inf, False)
    if isinstance(loop, (float, complex)):
        return difference(torch.tensor(batched), torch.tensor(loop))
    if isinstance(loop, (int, str, bytes)) and batched != loop:
        return Judged(f"{batched!r}, the loop has {loop!r}", math.inf)
    return EQUAL


def dense(t: torch.Tensor) -> torch.Tensor:
    """A tensor as a plain one: gradients of tables may be sparse."""
    return t.detach() if t.layout is torch.strided else t.detach().to_dense()


def on_common_rows(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Dense tensors of the rows that any of them has, where all are sparse (gradients of tables); else all rows."""
    if not all(x.is_sparse and x.sparse_dim() == 1 for x in tensors):
        return [dense(x) for x in tensors]
    parts = [x.coalesce() for x in tensors]
    rows = torch.cat([x.indices()[0] for x in parts]).unique()
    return [x.index_select(0, rows).to_dense() for x in parts]


def _wide(t: torch.Tensor) -> torch.Tensor:
    return t.to(torch.complex128 if t.is_complex() else torch.float64)


# -- many leaves ------------------------------------------------------------------------------------


class Differences(dict[int, Judged]):
    """By position, the leaves that differ."""

    worst = 0.0  # the largest error of the others, as a share of what is allowed


def differences(
    batched: Sequence[object],
    loop: Sequence[object],
    drawn: Iterable[Draw] = (),
    *,
    kinds: Sequence[Hashable] | None = None,
    groups: Sequence[Hashable] | None = None,
    coarsest: float = 0.0,
) -> Differences:
    """The leaves that differ.

    drawn: the loop and its float64 run, first on the numbers of `loop`, then on others (`draws`). It is asked only as
    long as a leaf would be refused. kinds: the loop's errors in leaves of one kind, the same of several instances, are
    one; without it each leaf is a kind. groups: of leaves whose largest number is one; without it all are.
    """
    out = Differences()
    if len(batched) != len(loop):
        out[0] = Judged(f"{len(batched)} tensors, the loop has {len(loop)}", math.inf, False)
        return out
    rest = [i for i, (x, y) in enumerate(zip(batched, loop, strict=True)) if not _is_equal(x, y)]
    if not rest:
        return out
    kinds = range(len(loop)) if kinds is None else kinds
    groups = [0] * len(loop) if groups is None else groups
    largest, own = dict.fromkeys(groups, 0.0), dict.fromkeys(kinds, 0.0)
    for group, leaf in zip(groups, loop, strict=True):
        largest[group] = max(largest[group], largest_of(leaf))
    # As near to the loop as rounding, so near enough to float64, whatever the loop's own error is.
    near = 1.0 / (1.0 + FACTOR)
    exact, number = [None] * len(loop), 0
    draws_left = iter(drawn)
    while True:
        for i in rest:
            bounds = {"own": own[kinds[i]], "largest": largest[groups[i]], "coarsest": coarsest}
            out[i] = difference(batched[i], loop[i], exact[i], **bounds)
        rest = [i for i in rest if out[i].message or (not number and out[i].share > near)]
        draw = (
            next(draws_left, None)
            if number < DRAWS and any(math.isfinite(out[i].share) for i in rest)
            else None
        )
        if draw is None or len(draw.loop) != len(loop) or len(draw.exact) != len(loop):
            break
        exact, number = exact if number else list(draw.exact), number + 1
        coarsest = max(coarsest, draw.coarsest)
        for kind, leaf, *pair in zip(kinds, loop, draw.loop, draw.exact, strict=True):
            own[kind] = max(own[kind], own_error(*pair) * _finer(leaf, pair[0]))
    out.worst = max((judged.share for judged in out.values() if not judged.message), default=0.0)
    for i in [i for i, judged in out.items() if not judged.message]:
        del out[i]
    return out


def _is_equal(a: object, b: object) -> bool:
    """Whether two leaves are dense tensors of one device with the same numbers."""
    if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor) or a.dtype is not b.dtype:
        return False
    if a.dtype is torch.complex32:  # `torch.equal` does not know it
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    return a.layout is b.layout is torch.strided and a.device == b.device and torch.equal(a, b)


def _finer(leaf: Any, drawn: Any) -> float:
    """The rounding error of the first tensor's type over that of the second's; 1 if one of them is no float tensor."""
    if not all(
        isinstance(t, torch.Tensor) and (t.is_floating_point() or t.is_complex()) for t in (leaf, drawn)
    ):
        return 1.0
    return torch.finfo(leaf.dtype).eps / torch.finfo(drawn.dtype).eps


def draws(run: Callable[[list[torch.Tensor]], Sequence[Any]], tensors: Tensors) -> Iterator[Draw]:
    """The loop's results in their own type and in float64: on these tensors, then on tensors that differ a little.

    Tensors that are float64 already are run in float32, so that there is a rounding error to see. Stops when `run`
    raises: it was not written for these types or numbers.
    """
    for seed in range(DRAWS):
        numbers = [nudged(t, seed) for t in tensors]
        try:
            with _CoarsestType() as of_loop:
                loop = run([_single(t) for t in numbers])
            with double_by_default():
                exact = run([doubled(t) for t in numbers])
            yield Draw(loop, exact, of_loop.eps)
        except Exception:  # noqa: BLE001 any: it may be the user's code
            return


class _CoarsestType(QuietDispatchMode):
    """Notes the coarsest type of floating point that operations give."""

    eps = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = self.call(func, args, kwargs or {})
        for t in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(t, torch.Tensor) and (t.is_floating_point() or t.is_complex()):
                self.eps = max(self.eps, torch.finfo(t.dtype).eps)
        return result


def nudged(t: torch.Tensor, seed: int) -> torch.Tensor:
    """A copy whose numbers differ by a thousandth of themselves, other ones for each seed; none for seed 0. Zeros,
    infinities and what is no floating point stay."""
    copied = t.detach().clone()
    if seed and (t.is_floating_point() or t.is_complex()) and t.layout is torch.strided:
        apart = max(_APART, 4 * torch.finfo(t.dtype).eps)
        generator = torch.Generator().manual_seed(seed)
        noise = torch.rand(t.shape, generator=generator, dtype=torch.float64, device="cpu").to(t.device)
        copied = (_wide(copied) * (1 + apart * noise)).to(t.dtype)
    return copied.requires_grad_(t.requires_grad)


def doubled(t: torch.Tensor) -> torch.Tensor:
    """A copy in float64 or complex128; what is no floating point stays as it is."""
    copied = _wide(t.detach()) if t.is_floating_point() or t.is_complex() else t.detach()
    return copied.clone().requires_grad_(t.requires_grad)


def _single(t: torch.Tensor) -> torch.Tensor:
    """A float64 (complex128) tensor as float32 (complex64); any other tensor unchanged."""
    narrow = {torch.float64: torch.float32, torch.complex128: torch.complex64}.get(t.dtype)
    return t if narrow is None else t.detach().to(narrow).requires_grad_(t.requires_grad)


class _InDouble(TorchFunctionMode):
    """Names of types of floating point mean float64 (complex128)."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = torch.Tensor.double if func in _NARROWING else func
        return func(*map(_wide_type, args), **{k: _wide_type(v) for k, v in (kwargs or {}).items()})


_NARROWING = (torch.Tensor.float, torch.Tensor.half, torch.Tensor.bfloat16)


def _wide_type(x: Any) -> Any:
    if not isinstance(x, torch.dtype):
        return x
    return torch.float64 if x.is_floating_point else torch.complex128 if x.is_complex else x


@contextmanager
def double_by_default() -> Iterator[None]:
    """Tensors that a forward makes itself are float64 too, and what it converts to another type of floating point."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _InDouble():
            yield
    finally:
        torch.set_default_dtype(before)
