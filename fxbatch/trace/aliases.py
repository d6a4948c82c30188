"""Which Values share memory, as the tensors that they stand for would.

In: calls whose result is a view of an input (`x[0]`, `x.view(-1)`, dropout in eval). Out: an Alias
record on both,
which `writes` follows when one of them is written to.

    row = x[0]        # alias_of(row).source is x
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

from fxbatch.torch_private import tree_leaves
from fxbatch.trace.table import Entry
from fxbatch.trace.values import Alias, Records, Value


def alias_of(v: Value) -> Alias | None:
    """The alias record of a Value, None when it shares memory with no other."""
    return getattr(v, "_alias", None)


def link_view(result: Value, source: Value, again: Any, call: Any, output: int) -> None:
    """Note that `result` is a view of `source`."""
    result._alias = Alias(source, again, call, output)
    above = alias_of(source)
    if above is None:
        above = source._alias = Alias()
    above.views.append(weakref.ref(result))


def link_views(entry: Entry, result: Any, inputs: Sequence[Value], again: Any, call: Any) -> None:
    """Note which outputs of a call are views of which inputs."""
    assert entry.outcome is not None
    leaves = result if entry.row else [x for x in tree_leaves(result) if type(x) is Value]
    for output, (leaf, i) in enumerate(zip(leaves, entry.outcome.aliases, strict=True)):
        if i >= 0:
            link_view(leaf, inputs[i], again, call, output)


def link_outputs(
    recorder: Records,
    entry: Entry,
    result: Any,
    inputs: Sequence[Value],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Note which outputs of a function's call are views of which inputs."""
    func = entry.signature.operation.target
    again, call = functools.partial(recorder.call, func, args, kwargs), (func, args, kwargs)
    if entry.alone >= 0:
        assert entry.outcome is not None
        link_view(result, inputs[entry.outcome.aliases[0]], again, call, 0)
    else:
        link_views(entry, result, inputs, again, call)
