"""The part of `explain` about packed minibatches: signatures with sizes (`f32[*,64]`), rows, padding, what runs alone.

In: a decorated callable's engine and a minibatch. Out: an Explanation where the whole forward was packed; lines about
packed calls inside a forward that was recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from fxbatch.explanation import Explanation, OperationRow, UnbatchedRow
from fxbatch.runtime.engine import Engine
from fxbatch.runtime.packed_route import NOT_PACKED, PackedRoute
from fxbatch.signature import tensor_spec

if TYPE_CHECKING:  # it imports sympy, which takes half a second that most programs need not spend
    from fxbatch.ragged.packed_function import PackedFunction, PackedMinibatch
    from fxbatch.runtime.packed_forward import Variant

RULE = "the whole forward, on packed rows"


def sized_text(shape: Sequence[Any], dtype: torch.dtype) -> str:
    """A type with * for each size that is the instance's own: `f32[*,64]`."""
    text = str(tensor_spec((), dtype, torch.device("cpu")))
    return text.replace("[]", f"[{','.join('*' if not isinstance(d, int) else str(d) for d in shape)}]")


def function_text(name: str, function: PackedFunction) -> str:
    """`forward(i64[*]) -> (f32[5])`."""
    graph = function.graph
    given = []
    for tensor, dims in zip(graph.tensors, function.dynamic, strict=False):
        given.append(
            sized_text(["*" if d in dims else int(n) for d, n in enumerate(tensor.shape)], tensor.dtype)
        )
    made = [sized_text(o.shape, o.dtype) for o in function.lowered.outputs]
    return f"{name}({', '.join(given)}) -> ({', '.join(made)})"


def padding_text(z: PackedMinibatch) -> str:
    """The rows of a minibatch, and the share of padding where it was padded."""
    found = []
    for size in z.lengths:
        padded = "" if size.uniform or not {"places", "sources"} & set(size.__dict__) else (
            f", {1 - size.total / (size.n * size.longest):.0%} padding where rows are padded"
        )  # fmt: skip
        found.append(f"{size.total} rows, {size.shortest} to {size.longest} per instance{padded}")
    return "; ".join(found)


def packed_runs(
    route: PackedRoute, fn: Any, instances: Sequence[Any]
) -> list[tuple[Variant, PackedMinibatch]]:
    """The packed functions that run a minibatch, with the sizes that they had; none where it is not packed."""
    if route.call(fn, instances, "list") is NOT_PACKED or route.forward is None:
        return []
    seen: list[tuple[Variant, PackedMinibatch]] = []
    route.forward.watched = seen
    try:
        route.call(fn, instances, "list")
    finally:
        route.forward.watched = None
    return seen


def explain_packed(engine: Engine, fn: Any, name: str, instances: Sequence[Any]) -> Explanation | None:
    """The explanation of a minibatch whose whole forward is packed; None where it is not."""
    seen = packed_runs(engine.packed, fn, instances)
    if not seen:
        return None
    rows: list[OperationRow] = []
    unbatched: list[UnbatchedRow] = []
    lines = []
    for variant, z in seen:
        text = function_text(name, variant.function)
        nodes = sum(n.op == "call_function" for n in variant.function.graph.module.graph.nodes)
        rows.append(OperationRow(name, text, RULE, "", calls=z.n, steps=1, launches=1, largest=z.n))
        lines.append(f"packed: {text}: {nodes} operators for {z.n} instances; {padding_text(z)}")
        unbatched += [
            UnbatchedRow(target, f"{reason}: instance by instance inside the forward", "", z.n)
            for target, reason in variant.function.lowered.alone.values()
        ]
    by_themselves = len(instances) - sum(row.calls for row in rows)
    if by_themselves:
        lines.append(f"packed: {by_themselves} instances ran one by one: nothing is built for their sizes")
    return Explanation(
        instances=len(instances), operations=rows, launches_before=len(instances),
        launches_after=len(rows) + by_themselves, steps=len(rows), lower_bound=len(rows), gathers_indexed=0,
        gathers_elided=0, bytes_gathered=0, unbatched=unbatched, packed=lines,
    )  # fmt: skip


def packed_call_lines(engine: Engine) -> list[str]:
    """One line per family of packed calls of an engine."""
    packed = engine.packed_calls
    if packed is None:
        return []
    lines = []
    for family in packed.families:
        assert family.signature is not None
        if not family.calls:
            continue
        if family.function is None:
            row = family.signature.inputs[0]
            lines.append(f"packed: stack of rows {row}: {family.calls} calls so far")
            continue
        text = function_text(family.signature.name, family.function)
        lines.append(f"packed: {text}: {family.calls} calls ran as {family.steps} so far")
        lines += [
            f"packed: {text}: {t} runs instance by instance: {why}"
            for t, why in family.function.lowered.alone.values()
        ]
    return lines
