"""The same pointwise function of adjacent slices is one kernel on the wide slice, forwards and backwards.

sigmoid(z[:, 0:150]), sigmoid(z[:, 150:300])   =>  s = sigmoid(z[:, 0:300]);  s[:, 0:150], s[:, 150:300]
cat([sigmoid_backward(a, s[:, 0:150]), sigmoid_backward(b, s[:, 150:300])], 1)
                                               =>  sigmoid_backward(cat([a, b], 1), s[:, 0:300])
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from torch import fx

from fxbatch.codegen.clean import apply_rules, slice_bounds
from fxbatch.codegen.kernel_calls import is_pointwise, out_call
from fxbatch.codegen.sizes import add_call, is_tensor, shape

aten = torch.ops.aten


def rewrite_gates(graph: fx.Graph) -> bool:
    """Returns whether anything changed."""
    changed = False
    while _widen_slices(graph):
        changed = True
    while apply_rules(graph, {aten.cat.default: (_widen_pieces,)}):
        changed = True
    return changed


def _sliced(node: Any) -> tuple[fx.Node, int, int, int] | None:
    """(source, dim, start, end) of a plain slice."""
    if not isinstance(node, fx.Node) or node.target is not aten.slice.Tensor:
        return None
    bounds = slice_bounds(node)
    return None if bounds is None else (node.args[0], *bounds)


def _widen_slices(graph: fx.Graph) -> bool:
    """Functions of slices with the same bounds in each source, adjacent to others of the same sources."""
    found: dict[Any, list[tuple[int, int, fx.Node]]] = {}
    for node in graph.nodes:
        if node.op != "call_function" or not node.users or not is_tensor(node) or not is_pointwise(node):
            continue
        part = _same_slices(node)
        if part is None or node.kwargs:
            continue
        sources, dim, start, end = part
        key = (node.target, sources, dim)
        found.setdefault(key, []).append((start, end, node))
    changed = False
    order = {node: i for i, node in enumerate(graph.nodes)}
    for (target, _, dim), parts in found.items():
        for run in _adjacent(parts):
            _replace_run(graph, target, dim, run, order)
            changed = True
    return changed


def _same_slices(node: fx.Node) -> tuple[tuple[Any, ...], int, int, int] | None:
    """(sources and plain arguments, dim, start, end) of a function of slices with the same bounds."""
    bounds: list[tuple[int, int, int]] = []
    sources: list[Any] = []
    for x in node.args:
        if isinstance(x, (list, tuple)):
            return None
        part = _sliced(x)
        if isinstance(x, fx.Node):
            if part is None or shape(x) != shape(node):
                return None
            bounds.append(part[1:])
            sources.append(part[0])
        else:
            sources.append((type(x), x))
    if not bounds or any(b != bounds[0] for b in bounds):
        return None
    return tuple(sources), *bounds[0]


def _adjacent(parts: list[tuple[int, int, fx.Node]]) -> list[list[tuple[int, int, fx.Node]]]:
    """Maximal runs of two or more parts, each starting where the one before ends."""
    runs: list[list[tuple[int, int, fx.Node]]] = []
    for part in sorted(parts, key=lambda x: x[:2]):
        if runs and runs[-1][-1][1] == part[0]:
            runs[-1].append(part)
        else:
            runs.append([part])
    return [run for run in runs if len(run) > 1]


def _replace_run(
    graph: fx.Graph,
    target: Any,
    dim: int,
    run: list[tuple[int, int, fx.Node]],
    order: dict[fx.Node, int],
) -> None:
    first = min((part[2] for part in run), key=order.__getitem__)
    low, high = run[0][0], run[-1][1]
    with graph.inserting_before(first):
        wide = [_wide_slice(graph, x, dim, low, high) if isinstance(x, fx.Node) else x for x in first.args]
        result = add_call(graph, target, tuple(wide))
        slices = [add_call(graph, aten.slice.Tensor, (result, dim, a - low, b - low)) for a, b, _ in run]
    for (_, _, node), view in zip(run, slices, strict=True):
        node.replace_all_uses_with(view)


def _wide_slice(graph: fx.Graph, piece: fx.Node, dim: int, low: int, high: int) -> fx.Node:
    source: Any = piece.args[0]
    if (low, high) == (0, shape(source)[dim][1]):
        return source
    return add_call(graph, aten.slice.Tensor, (source, dim, low, high))


def _widen_pieces(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """Neighbouring pieces of a concatenation that are the same function become one piece."""
    if not node.args[0]:
        return None
    dim = (node.args[1] if len(node.args) > 1 else 0) % len(shape(node))
    pieces = list(node.args[0])
    done: list[fx.Node] = []
    at = 0
    while at < len(pieces):
        end = at + 1
        while end < len(pieces) and _wide_arguments(pieces[at : end + 1], dim) is not None:
            end += 1
        wide = _wide_arguments(pieces[at:end], dim) if end - at > 1 else None
        done.append(pieces[at] if wide is None else _wide_call(graph, pieces[at], wide, dim))
        at = end
    if len(done) == len(pieces):
        return None
    return done[0] if len(done) == 1 else add_call(graph, aten.cat.default, (done, dim))


def _wide_call(graph: fx.Graph, piece: fx.Node, arguments: list[Any], dim: int) -> fx.Node:
    args = []
    for argument in arguments:
        if isinstance(argument, list):
            argument = add_call(graph, aten.cat.default, (argument, dim))
        elif isinstance(argument, tuple):
            source, low, high = argument
            argument = source
            if (low, high) != (0, shape(source)[dim][1]):
                argument = add_call(graph, aten.slice.Tensor, (source, dim, low, high))
        args.append(argument)
    return add_call(graph, piece.target, tuple(args), dict(piece.kwargs))


def _wide_arguments(pieces: list[fx.Node], dim: int) -> list[Any] | None:
    """For each argument of the wide call: (source, low, high), a list to concatenate, or a plain value.

    None where the pieces are no calls of one pointwise function, or where making them wide would copy.
    """
    first = pieces[0]
    if first.op != "call_function" or not is_pointwise(first) or out_call(first.target) is None:
        return None
    if any(p.target is not first.target or p.kwargs != first.kwargs or len(p.users) > 1 for p in pieces):
        return None
    if len({len(p.args) for p in pieces}) > 1:
        return None
    sides = [_side([p.args[i] for p in pieces], pieces, dim) for i in range(len(first.args))]
    if any(side is _NEVER for side in sides) or not any(isinstance(side, tuple) for side in sides):
        return None
    return sides


_NEVER = object()


def _side(values: list[Any], pieces: list[fx.Node], dim: int) -> Any:
    if not any(isinstance(v, fx.Node) for v in values):
        plain = all(type(v) is type(values[0]) and v == values[0] for v in values)
        return values[0] if plain and not isinstance(values[0], (list, tuple)) else _NEVER
    if not all(isinstance(v, fx.Node) for v in values):
        return _NEVER
    if any(shape(v) != shape(p) for v, p in zip(values, pieces, strict=True)):
        return _NEVER
    parts = [_sliced(v) for v in values]
    known = [p for p in parts if p is not None]
    one_source = len(known) == len(parts) and all(p[:2] == (known[0][0], dim) for p in known)
    if one_source and all(a[3] == b[2] for a, b in itertools.pairwise(known)):
        return known[0][0], known[0][2], known[-1][3]
    in_place = all(
        v.op == "call_function" and len(v.users) == 1 and out_call(v.target) is not None for v in values
    )
    return values if in_place else _NEVER
