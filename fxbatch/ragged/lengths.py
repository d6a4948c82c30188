"""One size of all instances of a minibatch: where the rows of each instance lie, packed and padded.

In: a column of sizes, one an instance. Out: offsets, segments, and rows moved between the packed form
[sum of sizes, ...] and the padded one [n, longest, ...]. Everything is made when it is first asked for.

    lengths = Lengths(np.array([2, 0, 3]), device)
    lengths.segment            # tensor([0, 0, 2, 2, 2])
    lengths.pad(rows)          # [3, 3, ...]
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from fxbatch.ragged.row_places import measure, padded_places, padded_rows
from fxbatch.ragged.segment_loops import (
    COMPILED,
    softmax,
    softmax_gradients,
    weighted_gradients,
    weighted_sums,
)


class Lengths:
    """A size of each instance."""

    def __init__(self, sizes: np.ndarray, device: torch.device) -> None:
        self.sizes = sizes  # int64 [n], contiguous
        self.device = device
        self.n = n = len(sizes)
        self.starts = starts = np.empty(n, dtype=np.int64)  # the first row of each instance
        self.total, self.longest, self.shortest = measure(sizes, starts)
        self.uniform = self.shortest == self.longest  # no instance is padded

    @staticmethod
    def of(sizes: Any, n: int, device: torch.device) -> Lengths:
        """Of n sizes, or of one that all instances have."""
        if type(sizes) is np.ndarray and sizes.shape == (n,) and sizes.dtype == np.int64:
            return Lengths(np.ascontiguousarray(sizes), device)
        sizes_of_all = np.empty(n, dtype=np.int64)
        sizes_of_all[:] = sizes
        return Lengths(sizes_of_all, device)

    def _to(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array if array.flags.c_contiguous else np.ascontiguousarray(array))
        return tensor if self.device.type == "cpu" else tensor.to(self.device)

    @functools.cached_property
    def list(self) -> list[int]:
        return self.sizes.tolist()

    @functools.cached_property
    def column(self) -> torch.Tensor:
        """int64 [n]: the sizes."""
        return self._to(self.sizes)

    @functools.cached_property
    def offsets(self) -> torch.Tensor:
        """int64 [n]: the first row of each instance."""
        return self._to(self.starts)

    @functools.cached_property
    def segments(self) -> np.ndarray:
        return np.repeat(np.arange(self.n), self.sizes)

    @functools.cached_property
    def segment(self) -> torch.Tensor:
        """int64 [total]: the instance of each row."""
        return self._to(self.segments)

    @functools.cached_property
    def each_row(self) -> torch.Tensor:
        """int64 [total]: all rows, in order."""
        return torch.arange(self.total, device=self.device)

    @functools.cached_property
    def positions(self) -> np.ndarray:
        return padded_places(self.sizes, self.total, 0)

    @functools.cached_property
    def position(self) -> torch.Tensor:
        """int64 [total]: the place of each row in its instance."""
        return self._to(self.positions)

    @functools.cached_property
    def places(self) -> torch.Tensor:
        """int64 [total]: the place of each row in the padded form, its first two dimensions as one."""
        return self._to(padded_places(self.sizes, self.total, self.longest))

    @functools.cached_property
    def sources(self) -> torch.Tensor:
        """int64 [n * longest]: the row that each place of the padded form repeats: its own, or its instance's last.

        Places of an instance without rows repeat row `total`, which is no instance's.
        """
        return self._to(padded_rows(self.sizes, self.total, self.longest, True))

    @functools.cached_property
    def own_rows(self) -> torch.Tensor:
        """int64 [n * longest]: the row at each place of the padded form; `total` where there is none."""
        return self._to(padded_rows(self.sizes, self.total, self.longest, False))

    @functools.cached_property
    def repeated(self) -> np.ndarray:
        """int64 [n, longest]: the places of each instance; those beyond its last repeat it."""
        return np.minimum(np.arange(self.longest)[None], (self.sizes[:, None] - 1).clip(0))

    @functools.cached_property
    def mask(self) -> torch.Tensor:
        """bool [n, longest]: which places of the padded form are rows."""
        return self._to(np.arange(self.longest)[None] < self.sizes[:, None])

    @functools.cached_property
    def padding(self) -> torch.Tensor:
        """bool [n, longest]: which places are none."""
        return ~self.mask

    # -- moving rows --------------------------------------------------------------------------------

    def spread(self, rows: torch.Tensor) -> torch.Tensor:
        """[total, ...] => [n, longest, ...]; padding repeats rows of the instance, so that whatever is computed of it
        is finite where the instance's own values are. Gradients of padding are dropped."""
        if not self.uniform and torch.is_grad_enabled() and rows.requires_grad:
            return _Spread.apply(rows, self)
        return self._repeated(rows)

    def _repeated(self, rows: torch.Tensor) -> torch.Tensor:
        if not self.uniform:
            if self.shortest == 0:
                rows = self.extended(rows)
            rows = rows.index_select(0, self.sources)
        return rows.reshape(self.n, self.longest, *rows.shape[1:])

    def pad(self, rows: torch.Tensor, fill: object = 0) -> torch.Tensor:
        """[total, ...] => [n, longest, ...]; padding is `fill`."""
        if not self.uniform:
            rows = self.extended(rows, fill).index_select(0, self.own_rows)
        return rows.reshape(self.n, self.longest, *rows.shape[1:])

    def none_empty(self) -> Lengths:
        """Itself; an error where an instance has none, as the loop raises one."""
        if self.shortest == 0:
            raise IndexError("an instance without rows has no extreme")
        return self

    def extended(self, rows: torch.Tensor, fill: float = 0) -> torch.Tensor:
        """[total, ...] => [total + 1, ...]: a last row that is no instance's."""
        return torch.cat([rows, rows.new_full((1, *rows.shape[1:]), fill)])

    def unpad(self, padded: torch.Tensor) -> torch.Tensor:
        """[n, longest, ...] => [total, ...]."""
        flat = padded.reshape(self.n * self.longest, *padded.shape[2:])
        return flat if self.uniform else flat.index_select(0, self.places)

    def hide(self, padded: torch.Tensor, dim: int, fill: float = float("-inf")) -> torch.Tensor:
        """Padding along dimension `dim` of [n, ...] becomes `fill`."""
        if self.uniform:
            return padded
        shape = [self.n] + [1] * (padded.dim() - 1)
        shape[dim] = self.longest
        return padded.masked_fill(self.padding.view(shape), fill)

    # -- over the rows of each instance ---------------------------------------------------------------

    def sum(self, rows: torch.Tensor) -> torch.Tensor:
        """[total, ...] => [n, ...]."""
        if self.uniform:
            return rows.reshape(self.n, self.longest, *rows.shape[1:]).sum(1)
        if rows.dtype in (torch.float16, torch.bfloat16):  # as torch.sum does it: added up as float32
            return self.sum(rows.float()).to(rows.dtype)
        if rows.is_floating_point() and rows.numel() and not (torch.is_grad_enabled() and rows.requires_grad):
            table = rows.reshape(self.total, -1)  # the same sums, 2 times as fast
            return torch.embedding_bag(table, self.each_row, self.offsets)[0].reshape(self.n, *rows.shape[1:])
        out = rows.new_zeros((self.n, *rows.shape[1:]))
        return out.index_add(0, self.segment, rows)

    def mean(self, rows: torch.Tensor) -> torch.Tensor:
        """[total, ...] => [n, ...]."""
        return self.divided(self.sum(rows), 1)

    def weighted(self, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """The sum of `weights * rows` over the rows of each instance: [total, 1], [total, d] => [n, d]."""
        if looped(rows) and looped(weights):
            return _applied(_Weighted, self, weights, rows)
        return self.sum(weights * rows)

    def softmax(self, rows: torch.Tensor) -> torch.Tensor:
        """The softmax over the rows of each instance."""
        if looped(rows) and rows.numel() <= NARROW * self.total:
            return _applied(_Softmax, self, rows)
        return self.unpad(self.pad(rows, float("-inf")).softmax(1))

    def extreme(self, rows: torch.Tensor, fill: object, how: str) -> torch.Tensor:
        """[total, ...] => [n, ...]: "amax" or "amin", where equal rows share the gradient; fill: what never is one."""
        return _Extreme.apply(rows, self, fill, how)

    def extreme_of_all(self, rows: torch.Tensor, fill: object, how: str) -> torch.Tensor:
        """[total, ...] => [n]: "max" or "min" of all elements, where equal ones share the gradient."""
        return _ExtremeOfAll.apply(rows, self, fill, how)

    def each(self, per_instance: torch.Tensor) -> torch.Tensor:
        """[n, ...] => [total, ...]: every row gets its instance's."""
        return per_instance.index_select(0, self.segment)

    def divided(self, per_instance: torch.Tensor, times: int) -> torch.Tensor:
        """[n, ...] divided by `times` the sizes."""
        count = self.column if times == 1 else self.column * times
        return per_instance / count.view(-1, *[1] * (per_instance.dim() - 1))

    def of_products(
        self, rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, how: str
    ) -> torch.Tensor:
        """The sum or the mean of `linear(rows, weight, bias)` over the rows of each instance: the product of their sum,
        which is one row per instance. Where an instance has no rows, as it is written: zero times a gradient that is
        not finite is not zero."""
        mean = how == "mean"
        if self.shortest == 0:
            products = self.sum(F.linear(rows, weight, bias))
            return self.divided(products, 1) if mean else products
        if mean:
            return F.linear(self.mean(rows), weight, bias)
        products = F.linear(self.sum(rows), weight)
        if bias is None:
            return products
        return products + self.column.view(-1, *[1] * (products.dim() - 1)) * bias

    # -- indices --------------------------------------------------------------------------------------

    def place(self, i: np.ndarray | int) -> np.ndarray | int:
        """int64 [n]: the place that `i` means, one number or one an instance: negative ones count from the end."""
        return np.where(i < 0, i + self.sizes, i) if type(i) is not int else i if i >= 0 else i + self.sizes

    def begin(self, start: np.ndarray | int) -> np.ndarray:
        """int64 [n]: where a slice from there on begins, which is no error where an instance has fewer."""
        return np.minimum(self.place(start), self.sizes).clip(0)

    def taken(self, start: np.ndarray | int, sizes: Lengths, step: int = 1) -> torch.Tensor:
        """int64 [sizes.total]: `sizes` rows of each instance, from `start` on."""
        first = np.broadcast_to(self.starts + start, (self.n,))
        return self._to(first[sizes.segments] + sizes.positions * step)

    def again(self, out: Lengths) -> torch.Tensor:
        """int64 [out.total]: the rows of each instance, from the first again after the last, as many as `out` says."""
        size = np.maximum(self.sizes, 1)[out.segments]
        return self._to(self.starts[out.segments] + out.positions % size)

    @functools.cached_property
    def reversed(self) -> torch.Tensor:
        """int64 [total]: the rows of each instance from its last to its first."""
        return self._to((self.starts + self.sizes - 1)[self.segments] - self.positions)

    def rolled(self, shift: int) -> torch.Tensor:
        """int64 [total]: the row that torch.roll moves to each place."""
        sizes = self.sizes[self.segments]
        return self._to(self.starts[self.segments] + (self.positions - shift) % np.maximum(sizes, 1))

    @functools.cached_property
    def by_time(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """For packed sequences: instances from longest to shortest; where each row is among all first, second, ...
        rows; instances at each time; rows in that order; and the instances back in order."""
        order = np.argsort(-self.sizes, kind="stable")
        counts = (self.sizes[:, None] > np.arange(self.longest)[None]).sum(0)
        time = np.repeat(np.arange(self.longest), counts)
        starts = np.cumsum(counts) - counts
        rank = np.arange(self.total) - starts[time]
        rows = self.starts[order[rank]] + time
        unsorted = np.argsort(order, kind="stable")
        counted = torch.from_numpy(counts.astype(np.int64))  # on the CPU, as torch wants it
        back = np.argsort(rows, kind="stable")
        return self._to(order), self._to(back), counted, self._to(rows), self._to(unsorted)


NARROW = 8  # elements of a row, up to which a loop is faster than padding and torch's vectors of exponentials
LOOPED = 1 << 18  # elements, up to which one loop is as fast as torch's kernels are on all threads


def looped(rows: torch.Tensor) -> bool:
    """Whether a loop of `segment_loops.py` does it."""
    return COMPILED and rows.dtype == torch.float32 and 0 < rows.numel() <= LOOPED and rows.is_cpu


def _applied(function: type[torch.autograd.Function], *arguments: Any) -> torch.Tensor:
    """Applies an autograd function; if no gradients are recorded, its forward alone."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in arguments[1:]):
        return function.apply(*arguments)
    return function.forward(Saved(), *arguments)


class Saved(torch.autograd.function.FunctionCtx):
    """What a forward leaves to its backward."""

    size: Lengths
    saved_tensors: tuple[torch.Tensor, ...]


Gradients = torch.Tensor | None | tuple[torch.Tensor | None, ...]


def _width(rows: torch.Tensor) -> int:
    return rows.numel() // len(rows)


class _Spread(torch.autograd.Function):
    """The rows of each instance, padded by its last. The gradient of padding is zero times a derivative, which is no
    zero where that is infinite."""

    @staticmethod
    def forward(ctx: Saved, rows: torch.Tensor, size: Lengths) -> torch.Tensor:
        ctx.size = size
        return size._repeated(rows)

    @staticmethod
    def backward(ctx: Saved, *gradients: torch.Tensor) -> Gradients:
        return ctx.size.unpad(gradients[0]), None


class WithoutNaN(torch.autograd.Function):
    """Zeros in place of NaN. As in torch's own, their gradient is what comes times zero: NaN where it is infinite."""

    @staticmethod
    def forward(ctx: Saved, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        return rows.masked_fill(rows.isnan(), 0)

    @staticmethod
    def backward(ctx: Saved, *gradients: torch.Tensor) -> Gradients:
        return gradients[0] * ctx.saved_tensors[0].isnan().logical_not()


class _Weighted(torch.autograd.Function):
    """The sum of the rows of each instance, each times its weight."""

    @staticmethod
    def forward(ctx: Saved, size: Lengths, weights: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        weights, rows = weights.contiguous(), rows.contiguous()
        ctx.size = size
        ctx.save_for_backward(weights, rows)
        reduced = rows.new_empty((size.n, *rows.shape[1:]))
        weighted_sums(weights.data_ptr(), rows.data_ptr(), size.sizes, _width(rows), reduced.data_ptr())
        return reduced

    @staticmethod
    def backward(ctx: Saved, *gradients: torch.Tensor) -> Gradients:
        (weights, rows), gradient, size = ctx.saved_tensors, gradients[0].contiguous(), ctx.size
        if torch.is_grad_enabled():  # a gradient of it may be asked for
            each = size.each(gradient)
            return None, (each * rows).sum(1, keepdim=True), each * weights
        of_weights, of_rows = torch.empty_like(weights), torch.empty_like(rows)
        weighted_gradients(
            gradient.data_ptr(), weights.data_ptr(), rows.data_ptr(), size.sizes, _width(rows), of_weights.data_ptr(),
            of_rows.data_ptr(),
        )  # fmt: skip
        return None, of_weights, of_rows


class _Softmax(torch.autograd.Function):
    """The softmax over the rows of each instance, without padding."""

    @staticmethod
    def forward(ctx: Saved, size: Lengths, rows: torch.Tensor) -> torch.Tensor:
        rows = rows.contiguous()
        result = torch.empty_like(rows)
        softmax(rows.data_ptr(), size.sizes, _width(rows), result.data_ptr())
        ctx.size = size
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Saved, *gradients: torch.Tensor) -> Gradients:
        (result,), gradient, size = ctx.saved_tensors, gradients[0].contiguous(), ctx.size
        if torch.is_grad_enabled():  # a gradient of it may be asked for
            row_gradients = gradient * result
            return None, row_gradients - result * size.each(size.sum(row_gradients))
        row_gradients = torch.empty_like(result)
        softmax_gradients(
            gradient.data_ptr(), result.data_ptr(), size.sizes, _width(result), row_gradients.data_ptr()
        )
        return None, row_gradients


class _Extreme(torch.autograd.Function):
    """The largest (or smallest) row of each instance, feature by feature."""

    @staticmethod
    def forward(ctx: Saved, rows: torch.Tensor, size: Lengths, fill: float, how: str) -> torch.Tensor:
        padded = size.pad(rows, fill)
        result = padded.amax(1) if how == "amax" else padded.amin(1)
        ctx.size = size
        ctx.save_for_backward(rows, result)
        return result

    @staticmethod
    def backward(ctx: Saved, *gradients: torch.Tensor) -> Gradients:
        rows, result = ctx.saved_tensors
        (gradient,), size = gradients, ctx.size
        chosen = (rows.detach() == size.each(result.detach())).to(rows.dtype)
        # As torch's own: where the largest is NaN nothing equals it, and every row gets 0 / 0.
        return size.each(gradient) * chosen / size.each(size.sum(chosen)), None, None, None


class _ExtremeOfAll(torch.autograd.Function):
    """The largest (or smallest) element of each instance."""

    @staticmethod
    def forward(ctx: Saved, rows: torch.Tensor, size: Lengths, fill: float, how: str) -> torch.Tensor:
        padded = size.pad(rows, fill).flatten(1)
        extreme = padded.amax(1) if how == "max" else padded.amin(1)
        ctx.size = size
        ctx.save_for_backward(rows, extreme)
        return extreme

    @staticmethod
    def backward(ctx: Saved, *gradients: torch.Tensor) -> Gradients:
        rows, extreme = (t.detach() for t in ctx.saved_tensors)
        (gradient,), size = gradients, ctx.size
        reference = size.each(extreme).view(-1, *[1] * (rows.dim() - 1))
        chosen = (rows == reference) | (rows.isnan() & reference.isnan())
        count = size.sum((chosen.flatten(1).sum(1) if chosen.dim() > 1 else chosen).to(rows.dtype))
        return chosen * size.each(gradient / count).view_as(reference), None, None, None


def pairs_in_a_row(padded: torch.Tensor, a: Lengths, b: Lengths, both: Lengths) -> torch.Tensor:
    """[n, longest of a, longest of b, ...] => [total of a * b, ...]."""
    width = np.maximum(b.sizes, 1)[both.segments]
    i, j = both.positions // width, both.positions % width
    places = (both.segments * a.longest + i) * b.longest + j
    return padded.flatten(0, 2).index_select(0, torch.from_numpy(places).to(padded.device))


def pairs(rows: torch.Tensor, a: Lengths, b: Lengths, both: Lengths) -> torch.Tensor:
    """[total of a * b, ...] => [n, longest of a, longest of b, ...]; padding repeats pairs of the instance."""
    i, j = a.repeated[:, :, None], b.repeated[:, None, :]
    places = both.starts[:, None, None] + i * b.sizes[:, None, None] + j
    if both.shortest == 0:
        places[both.sizes == 0] = both.total
        rows = both.extended(rows)
    picked = rows.index_select(0, torch.from_numpy(places.reshape(-1)).to(rows.device))
    return picked.view(*places.shape, *rows.shape[1:])


def interleaved(parts: Sequence[Lengths]) -> torch.Tensor:
    """The order that takes the rows of all parts, part after part, to those of each instance, one after another."""
    base = 0
    keys, rows = [], []
    for place, part in enumerate(parts):
        keys.append(part.segments * len(parts) + place)
        rows.append(np.arange(part.total, dtype=np.int64) + base)
        base += part.total
    order = np.argsort(np.concatenate(keys), kind="stable")
    return torch.from_numpy(np.concatenate(rows)[order]).to(parts[0].device)
