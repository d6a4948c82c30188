"""A body over all instances at once: built once, called with the columns of a minibatch.

In: a body of one instance, example tensors, and which dimensions are the instance's own. Out: a PackedFunction.

    function = PackedFunction.of(body, [words], ((0,),), [weight])
    packed = function([[words_0, words_1]], [weight])      # one tensor per output, in the layout that it says
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from fxbatch.ragged import rules_indices, rules_products, rules_sequences, rules_views  # noqa: F401 - they register their rules
from fxbatch.ragged.expressions import ColumnsFunction, columns_function
from fxbatch.ragged.lengths import Lengths
from fxbatch.ragged.lower import Packed, PackedGraph, lower
from fxbatch.ragged.packed_column import PackedColumn, together
from fxbatch.ragged.recurrent import NAMES
from fxbatch.ragged.row_places import windows
from fxbatch.ragged.rules import kept_whole, rule_of
from fxbatch.ragged.symbolic import SizedGraph
from fxbatch.ragged.values_alone import alone
from fxbatch.torch_private import set_grad_enabled


@dataclass(eq=False)
class PackedMinibatch:
    """A minibatch as the function reads it: the number of instances, their sizes and their numbers."""

    n: int
    lengths: list[Lengths]
    columns: list[Any]
    device: torch.device
    sizes: Sequence[np.ndarray]  # one column a symbol
    # Of results, where they depend on values.
    sizes_by_values: dict[Any, Lengths] = field(default_factory=dict)

    def tensor(self, column: object, dtype: torch.dtype) -> torch.Tensor:
        """[n]: a number of each instance."""
        return torch.from_numpy(np.broadcast_to(np.asarray(column), (self.n,)).copy()).to(self.device, dtype)

    def counted(self, size: Lengths, flags: torch.Tensor) -> np.ndarray:
        """int64 [n]: how many rows of each instance a mask picks."""
        before = np.zeros(size.total + 1, dtype=np.int64)
        np.cumsum(flags.detach().cpu().numpy(), out=before[1:])
        return before[size.starts + size.sizes] - before[size.starts]

    def sized(self, column: object) -> Lengths:
        """A size that depends on values."""
        return Lengths.of(column, self.n, self.device)

    def padded_rows(
        self, rows: torch.Tensor, size: Lengths, out: Lengths, before: Any, value: float
    ) -> torch.Tensor:
        """Rows with `before` (one number, or one an instance) and more rows of a value at both ends."""
        padded = rows.new_full((out.total, *rows.shape[1:]), value)
        first = out.starts + before
        places = torch.from_numpy(first[size.segments] + size.positions).to(self.device)
        return padded.index_copy(0, places, rows)

    def part(
        self, padded: torch.Tensor, dim: int, start: object, size: Lengths, step: int, have: int
    ) -> torch.Tensor:
        """Of [n, ..., have, ...], along dimension 1 or 2, `size` elements from `start` on; padding repeats the last."""
        start = np.broadcast_to(np.asarray(start), (self.n,))
        places = start[:, None] + size.repeated * step
        return self._picked(padded, dim, places.clip(0, max(have - 1, 0)))

    def joined(
        self, parts: Sequence[torch.Tensor], sizes: Sequence[Lengths], out: Lengths, dim: int
    ) -> torch.Tensor:
        """The elements of each instance in all parts, one part after another, along dimension 1 or 2."""
        places, first = out.repeated, np.zeros((self.n, 1), dtype=np.int64)
        row_places, begin = np.zeros_like(places), 0
        for size in sizes:
            mine = (places >= first) & (places < first + size.sizes[:, None])
            row_places = np.where(mine, places - first + begin, row_places)
            first, begin = first + size.sizes[:, None], begin + size.longest
        return self._picked(torch.cat(list(parts), dim), dim, row_places)

    def _picked(self, padded: torch.Tensor, dim: int, places: np.ndarray) -> torch.Tensor:
        front = padded.transpose(1, dim)
        rows = torch.from_numpy(places + np.arange(self.n)[:, None] * front.shape[1]).to(self.device)
        picked = front.flatten(0, 1).index_select(0, rows.view(-1))
        return picked.view(*places.shape, *front.shape[2:]).transpose(1, dim)

    def attention(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_size: Lengths,
        mask: torch.Tensor | None,
        dropout: float,
        causal: bool,
        scale: float | None,
    ) -> torch.Tensor:
        """Scaled dot product attention, [n, heads, longest, features] each; no query sees padding.

        Queries of an instance without keys give zeros.
        """
        if causal:
            before = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).tril()
            mask = _masked(mask, before)
        if not k_size.uniform:
            seen = k_size.mask[:, None, None, :]
            if k_size.shortest == 0:
                seen = seen | (k_size.column == 0)[:, None, None, None]
            mask = _masked(mask, seen)
        out = F.scaled_dot_product_attention(q, k, v, mask, dropout, scale=scale)
        if k_size.shortest == 0 and k_size.longest:
            out = out.masked_fill((k_size.column == 0)[:, None, None, None], 0)
        return out

    def rows(
        self, size: Lengths, index: torch.Tensor, index_size: Lengths | None, from_end: bool = False
    ) -> torch.Tensor:
        """Rows of all instances that indices into the rows of each mean. index_size: how many indices each has,
        if their first dimension differs; else they are [n, ...]. from_end: negative ones count from the end. An index
        that is out of the instance's range becomes one that is out of every range, so that reading it is an error."""
        trailing = [1] * (index.dim() - 1)
        begin, count = (
            (x if index_size is None else index_size.each(x)).view(-1, *trailing)
            for x in (size.offsets, size.column)
        )
        row = torch.where(index < 0, index + count, index) if from_end else index
        return torch.where((row < 0) | (row >= count), size.total, row + begin)

    def elements(
        self, sizes: Sequence[Lengths], indices: Sequence[torch.Tensor], index_size: Lengths | None
    ) -> torch.Tensor:
        """Places in a padded tensor [n, longest, longest], its dimensions as one, that two indices mean: own says how
        many each instance has, else they are [n, ...]. One that is out of range is beyond the last place."""
        instance = torch.arange(self.n, device=self.device) if index_size is None else index_size.segment
        shape = (-1, *[1] * (indices[0].dim() - 1))
        place, beyond = instance.view(shape), 1
        bad = torch.zeros((), dtype=torch.bool, device=self.device)
        for size, index in zip(sizes, indices, strict=True):
            count = size.column[instance].view(shape)
            row = torch.where(index < 0, index + count, index)
            bad = bad | (row < 0) | (row >= count)
            place, beyond = place * size.longest + row, beyond * size.longest
        return torch.where(bad, self.n * beyond, place)

    def recurrent(
        self,
        name: str,
        size: Lengths,
        rows: torch.Tensor,
        states: list[torch.Tensor],
        params: list[torch.Tensor],
        *rest: object,
    ) -> tuple[torch.Tensor, ...]:
        """A recurrent layer over the rows of each instance; states [n, layers, features]. The last states are
        [n, layers, 1, features]."""
        order, back, counts, sequence, unsorted = size.by_time
        first = [h.index_select(0, order).transpose(0, 1).contiguous() for h in states]
        data = rows.index_select(0, sequence)
        hx = first if name == "lstm" else first[0]
        outputs = _RECURRENT[name](data, counts, hx, params, *rest)
        ends = [h.index_select(1, unsorted).transpose(0, 1).unsqueeze(2) for h in outputs[1:]]
        return (outputs[0].index_select(0, back), *ends)

    def windows(
        self,
        size: Lengths,
        out: Lengths,
        rows: torch.Tensor,
        kernel: int,
        left: int,
        stride: int,
        dilation: int,
        fill: object = 0,
    ) -> torch.Tensor:
        """The rows that each place of a sliding kernel meets, `fill` beyond the ends of the instance: [total of out,
        kernel, ...]. left: how far the first place begins before the first row."""
        met = windows(size.sizes, out.sizes, out.total, size.total, kernel, left, stride, dilation)
        index = torch.from_numpy(met).to(self.device)
        return size.extended(rows, fill).index_select(0, index).view(out.total, kernel, *rows.shape[1:])

    def conv1d(
        self,
        size: Lengths,
        out: Lengths,
        rows: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        left: int,
        stride: int,
        dilation: int,
        groups: int,
    ) -> torch.Tensor:
        """A convolution along the rows of each instance: [total, channels] => [total of out, channels].

        Each row that it gives is one product with the rows that its kernel meets; those beyond an end are zero.
        """
        kernel, channels = weight.shape[2], rows.shape[1]
        given = self.windows(size, out, rows, kernel, left, stride, dilation)
        if groups == 1:
            flat = weight.transpose(1, 2).reshape(len(weight), kernel * channels)
            return F.linear(given.flatten(1), flat, bias)
        each = channels // groups
        given = given.view(out.total, kernel, groups, each).permute(2, 0, 1, 3).flatten(2)
        flat = weight.view(groups, -1, each, kernel).permute(0, 3, 2, 1).flatten(1, 2)
        product = torch.bmm(given, flat).transpose(0, 1).flatten(1)
        return product if bias is None else product + bias

    def class_weights(
        self, target: torch.Tensor, weight: torch.Tensor | None, ignored: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """The weight of each target in a mean: that of its class (1 without weights), 0 for the ignored one."""
        counted = target != ignored
        if weight is None:
            return counted.to(dtype)
        return weight[torch.where(counted, target, 0)] * counted


def _masked(mask: torch.Tensor | None, seen: torch.Tensor) -> torch.Tensor:
    """An attention mask, of flags or of numbers that are added, by which nothing is seen but what is in both."""
    if mask is None:
        return seen
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, float("-inf"))


_RECURRENT = {name: getattr(torch.ops.aten, name).data for name in NAMES}


@dataclass
class PackedFunction:
    """A body over all instances of a minibatch."""

    graph: SizedGraph
    lowered: PackedGraph
    sizes: Callable[..., list[Any]]
    dynamic: Sequence[Sequence[int]]

    @staticmethod
    def of(
        body: Callable[..., object],
        tensors: Sequence[torch.Tensor],
        dynamic: Sequence[Sequence[int]],
        shared: Sequence[torch.Tensor],
        *,
        flags_known: bool = True,
        code: Sequence[object] = (),
        by_tape: bool = False,
    ) -> PackedFunction:
        """`body(*tensors, *shared)`, which gives a flat list of tensors, as a function of minibatches.

        NoPackedForm says why there is none. flags_known: whether `requires_grad` of these tensors is that of all.
        code: the users' modules and functions that the body runs. by_tape: whether a tape of them is tried first, which
        is enough where each of its calls has a rule.
        """
        every = [*dynamic, *[()] * len(shared)]
        inputs, how = [*tensors, *shared], {"flags_known": flags_known, "code": code}

        def lowered_by(tape: bool) -> tuple[SizedGraph, PackedGraph]:
            graph = SizedGraph(body, inputs, every, kept_whole(), **how, by_tape=tape)
            return graph, lower(graph, rule_of, alone, len(shared))

        pair = None
        if by_tape:
            with contextlib.suppress(Exception):
                pair = lowered_by(True)
        graph, lowered = lowered_by(False) if pair is None or pair[1].alone else pair
        sizes = columns_function([*lowered.lengths, *lowered.columns], graph.symbols)
        return PackedFunction(graph, lowered, sizes, dynamic)

    def output_shapes(self, sizes: Sequence[int]) -> list[tuple[int, ...]]:
        """The shape of each output, for one instance of these sizes."""
        return [tuple(map(int, shape(*sizes))) for shape in self._shapes]

    @functools.cached_property
    def _shapes(self) -> list[ColumnsFunction]:
        return [columns_function(o.shape, self.graph.symbols) for o in self.lowered.outputs]

    def columns_of(self, columns: Sequence[Sequence[torch.Tensor] | PackedColumn]) -> list[np.ndarray]:
        """The sizes of each instance, one column a symbol."""
        sizes: list[np.ndarray] = []
        for column, dims in zip(columns, self.dynamic, strict=True):
            lengths = column.sizes(dims) if isinstance(column, PackedColumn) else None
            sizes += lengths or [np.array([t.shape[d] for t in column], dtype=np.int64) for d in dims]
        return sizes

    def __call__(
        self,
        columns: Sequence[Sequence[torch.Tensor] | PackedColumn],
        shared: Sequence[torch.Tensor],
        sizes: Sequence[np.ndarray],
        device: torch.device,
    ) -> tuple[list[torch.Tensor], PackedMinibatch]:
        """columns: per input the tensors of all instances. The outputs, in the layouts of `lowered.outputs`."""
        n = len(columns[0])
        numbers = self.sizes(*sizes)
        count = len(self.lowered.lengths)
        lengths = [Lengths.of(x, n, device) for x in numbers[:count]]
        z = PackedMinibatch(n, lengths, numbers[count:], device, sizes)
        places = enumerate(zip(self.graph.inputs, columns, self.dynamic, strict=False))
        inputs = [  # what nobody reads may be anything
            self.packed(i, column, dims, sizes, device) if node.users else column[0]
            for i, (node, column, dims) in places
        ]
        arguments, grad = [*inputs, *shared], torch.is_grad_enabled()
        try:
            return self.lowered.module.forward(z, arguments), z
        finally:  # where something was raised
            set_grad_enabled(grad)

    def packed(
        self,
        place: int,
        column: Sequence[torch.Tensor] | PackedColumn,
        dims: Sequence[int],
        sizes: Sequence[np.ndarray],
        device: torch.device,
    ) -> torch.Tensor:
        """An input of all instances in its layout."""
        if isinstance(column, PackedColumn):
            if column.sizes(dims) is not None:
                return column.tensor
            column = list(column)
        first = sum(len(d) for d in self.dynamic[:place])
        lengths = [Lengths(x, device) for x in sizes[first : first + 2]] if len(dims) == 2 else []
        return together(column, dims, lengths)

    def apart(self, outputs: Sequence[torch.Tensor], z: PackedMinibatch) -> list[list[torch.Tensor]]:
        """Each output as the tensors of the instances."""
        return [list(self.column(o, t, z)) for o, t in zip(self.lowered.outputs, outputs, strict=True)]

    def column(self, output: Packed, tensor: torch.Tensor, z: PackedMinibatch) -> PackedColumn:
        """An output as it is, from which the tensors of the instances are taken when somebody asks for one."""
        sizes_of_output = [output.shape[a] for a in output.axes]
        lengths = [
            z.sizes_by_values[e] if e in z.sizes_by_values else z.lengths[self.lowered.lengths.index(e)]
            for e in sizes_of_output
        ]
        return PackedColumn(tensor, output.layout, output.axes, lengths, z.n)
