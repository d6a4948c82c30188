"""PyTorch's module database with a leading size that differs by instance: what is packed, and whether it is right.

In: the samples of torch's own tests, each in a decorated forward. Out: for each module one of "packed", "alone" (right,
instance by instance inside the packed function), "recorded" (right, by recorded calls), "refused" (an error that says
why), "no loop" (the sample itself does not run), or "wrong".

    python -m tests.ragged.sized_modules            # prints what is not packed, and the share of each
"""

from __future__ import annotations

import collections
import copy
import functools
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import fxbatch
from fxbatch.errors import FxbatchError
from fxbatch.torch_private import tree_leaves
from tests.conformance.databases import Call, entries
from tests.ragged.against_loop import Instances, Results, difference

SAMPLES = 4  # of a module
# Random ones, and those that take their sizes from the first instance.
LEFT_OUT = ("Dropout", "RReLU", "FractionalMaxPool", "Lazy")
KINDS = ("wrong", "refused", "recorded", "alone", "packed", "no loop")


_TENSOR, _PLAIN, _ROW, _LIST, _NAMED = range(5)


def described(x: Any, tensors: list[torch.Tensor]) -> tuple[Any, ...]:
    """An argument as nested tuples of numbers, which `built` makes it from again; its tensors are added to a list."""
    if isinstance(x, torch.Tensor):
        tensors.append(x.detach())
        return _TENSOR, len(tensors) - 1
    if type(x) in (tuple, list):
        return _ROW if type(x) is tuple else _LIST, tuple(described(y, tensors) for y in x)
    if type(x) is dict:
        return _NAMED, tuple((k, described(y, tensors)) for k, y in x.items())
    return _PLAIN, x


def built(what: tuple[Any, ...], tensors: Sequence[torch.Tensor]) -> Any:
    """The argument that was described."""
    kind, x = what
    if kind == _TENSOR:
        return tensors[x]
    if kind == _ROW:
        return tuple([built(y, tensors) for y in x])
    if kind == _LIST:
        return [built(y, tensors) for y in x]
    return {k: built(y, tensors) for k, y in x} if kind == _NAMED else x


class Holder(nn.Module):
    """One sample's module, called on the tensors of an instance and on the sample's other arguments."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        assert call.module is not None
        self.module = call.module
        self.tensors: list[torch.Tensor] = []
        self.args = described(call.args, self.tensors)
        self.kwargs = described(call.kwargs, self.tensors)

    @fxbatch.autobatch(out="list", adaptive=False)
    def forward(self, *given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        result = self.module(*built(self.args, given), **built(self.kwargs, given))
        return tuple([x for x in tree_leaves(result) if isinstance(x, torch.Tensor)])

    def how(self) -> str:
        """How its last minibatch ran."""
        packed = next(iter(self.__dict__["_fxbatch_engines"].values())).packed.forward
        variants = [] if packed is None else [v for f in packed.families.values() for v in f.variants]
        if not variants:
            return "recorded"
        return "alone" if any(v.function.lowered.alone for v in variants) else "packed"


def outcome(call: Call) -> str:
    """What becomes of one sample, "" where it has no leading size to vary."""
    holder = Holder(call)
    sized = [t.shape[0] for t in holder.tensors if t.dim() and t.shape[0] > 1]
    if not sized or any(t.layout is not torch.strided for t in holder.tensors):
        return ""
    size, instances = sized[0], []
    for length in (size, size - 1, 1, size):
        given = [_leaf(t[:length] if t.dim() and t.shape[0] == size else t) for t in holder.tensors]
        alone = copy.deepcopy(holder)
        try:
            with fxbatch.disabled():
                alone(*[[t] for t in given])
        except Exception as error:  # noqa: BLE001 - a module that does not take this size: not an instance
            if length == size:  # but its own sample's it takes
                return f"no loop: {type(error).__name__}: {str(error)[:120]}"
            continue
        instances.append(given)
    if len({tuple(t.shape for t in i) for i in instances}) < 2:
        return ""
    columns = [list(c) for c in zip(*instances, strict=True)]
    try:
        found = holder(*columns)
    except FxbatchError as error:
        return f"refused: {type(error).__name__}: {str(error)[:120]}"
    except Exception as error:  # noqa: BLE001 - it must not fail where the loop does not
        return f"wrong: {type(error).__name__}: {str(error)[:120]}"
    wrong = difference(list(zip(*found, strict=True)), instances, functools.partial(_loop, holder))
    return f"wrong: {wrong}" if wrong else holder.how()


def _loop(holder: Holder, instances: Instances, shared: Sequence[torch.Tensor]) -> Results:
    """What the module gives of each instance alone, on copies of the default type."""
    alone = [copy.deepcopy(holder).to(torch.get_default_dtype()) for _ in instances]
    with fxbatch.disabled():
        return [h(*[[t] for t in x])[0] for h, x in zip(alone, instances, strict=True)]


def _leaf(t: torch.Tensor) -> torch.Tensor:
    return t.detach().clone().requires_grad_(t.is_floating_point() or t.is_complex())


def main(names: list[str]) -> None:
    warnings.simplefilter("ignore")
    counts: collections.Counter[str] = collections.Counter()
    for entry in entries().values():
        if names and entry.name not in names:
            continue
        if (
            entry.kind != "module"
            or torch.float32 not in entry.dtypes
            or any(x in entry.name for x in LEFT_OUT)
        ):
            continue
        found = [x for x in map(outcome, entry.calls(torch.float32, seed=0)[:SAMPLES]) if x]
        if not found:
            continue
        kind = min((x.partition(":")[0] for x in found), key=KINDS.index)
        counts[kind] += 1
        if kind != "packed":
            print(entry.name, sorted(set(found)), flush=True)
    print(dict(counts))


if __name__ == "__main__":
    main(sys.argv[1:])
