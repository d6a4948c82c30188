"""The combinators of Looks et al. 2017, section 3, as an interpreter that shares no code with fxbatch.blocks.

In: a program, a tuple `(form, arguments ...)` of forms below. Out: its meaning for an input of a type: the type of its
output, and a function from plain Python objects, lists, tuples and tensors to the same; Refused when it has none.

    meaning(("pipe", ("map", ("scalar",)), ("reduce", ("apply", "sub"), None)), Py())     # (Tensor(()), a function)

Types: Py(hint), Tensor(shape, dtype), a list of types for tuples, Seq(t), Rep(t) for endless sequences, None for void.
The hint of a Py says what kind of object it is, so that data can be drawn for it; types are compared without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


class Refused(Exception):
    """The program has no meaning for an input of this type."""


@dataclass(frozen=True)
class Py:
    hint: Any = field(default=None, compare=False)


@dataclass(frozen=True)
class Tensor:
    shape: tuple[int, ...] = ()
    dtype: str = "float64"


@dataclass(frozen=True)
class Seq:
    of: Any


@dataclass(frozen=True)
class Rep:
    of: Any


class Endless:
    """The value of a Rep."""

    def __init__(self, item: Any) -> None:
        self.item = item


Type = Any
Meaning = tuple[Type, Callable[[Any], Any]]
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "neg": torch.neg, "tanh": torch.tanh, "total": torch.sum, "pair": lambda x: (x, 2 * x), "add": torch.add,
    "sub": torch.sub, "mul": lambda a, b: a * b, "step": lambda x, s: (x * s, x - s), "first": lambda a, b: a,
}  # fmt: skip
TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "twice": lambda x: [x, x],
    "plus": lambda x: x + 1,
    "count": len,
}


def demand(condition: Any) -> None:
    if not condition:
        raise Refused


def canonical(t: Type) -> Type:
    """Tuples and sequences of Python objects are Python objects."""
    if isinstance(t, list) and t and all(isinstance(x, Py) for x in t):
        return Py(tuple(x.hint for x in t))
    return Py([t.of.hint]) if isinstance(t, (Seq, Rep)) and isinstance(t.of, Py) else t


def element(t: Type) -> Type:
    """The type of the elements of what can be mapped over."""
    if isinstance(t, Py):
        return Py(t.hint[0] if isinstance(t.hint, list) else None)
    if isinstance(t, list):
        demand(t and all(x == t[0] for x in t))
        return t[0]
    demand(isinstance(t, (Seq, Rep)))
    return t.of


def leaves(t: Type) -> list[Type]:
    """The tensor and object types in a type."""
    if isinstance(t, list):
        return [leaf for x in t for leaf in leaves(x)]
    return leaves(t.of) if isinstance(t, (Seq, Rep)) else [] if t is None else [t]


def zero(t: Type) -> Any:
    demand(not isinstance(t, Rep) and not any(isinstance(x, Py) for x in leaves(t)))
    if isinstance(t, Tensor):
        return torch.zeros(t.shape, dtype=getattr(torch, t.dtype))
    if isinstance(t, Seq):
        return []
    return None if t is None else tuple(zero(x) for x in t)


def takes_nothing(p: Any) -> bool:
    """Whether a program ignores its input, so that it may read anything."""
    form, *args = p
    if form == "pipe":
        return takes_nothing(args[0])
    if form in ("all_of", "record"):
        return all(takes_nothing(q[1] if form == "record" else q) for q in args)
    if form == "graph":
        return not any(0 in reads and not takes_nothing(q) for q, reads in args)
    return form in ("const", "zeros")


def meaning(p: Any, t: Type) -> Meaning:
    out, run = FORMS[p[0]](t, *p[1:])
    return canonical(out), run


def scalar(t: Type, dtype: str = "float64") -> Meaning:
    demand(isinstance(t, Py))
    return Tensor((), dtype), lambda x: torch.tensor(float(x)).to(getattr(torch, dtype))


def one_hot(t: Type, n: int) -> Meaning:
    demand(isinstance(t, Py))
    rows = torch.eye(n, dtype=torch.float64)
    return Tensor((n,)), lambda x: dict(enumerate(rows))[x]


def transform(t: Type, name: str) -> Meaning:
    demand(isinstance(t, Py))
    hint = {"twice": [t.hint], "plus": t.hint, "count": "number"}[name]
    return Py(hint), TRANSFORMS[name]


def apply(t: Type, name: str) -> Meaning:
    def tensors(x: Type) -> bool:
        return all(map(tensors, x)) if isinstance(x, list) else isinstance(x, Tensor)

    def types(x: Any) -> Type:
        return [types(y) for y in x] if isinstance(x, tuple) else Tensor(tuple(x.shape), str(x.dtype)[6:])

    demand(tensors(t) and leaves(t))
    f = FUNCTIONS[name]
    run = (lambda x: f(*x)) if isinstance(t, list) else f
    try:
        out = types(run(zero(t)))
    except Exception as e:
        raise Refused from e
    demand(leaves(out))
    return out, run


def pipe(t: Type, *ps: Any) -> Meaning:
    runs = []
    for p in ps:
        t, run = meaning(p, t)
        runs.append(run)

    def through(x: Any) -> Any:
        for run in runs:
            x = run(x)
        return x

    return t, through


def record(t: Type, *items: tuple[Any, Any]) -> Meaning:
    positions = [k for k, _ in items] == list(range(len(items)))
    if not all(takes_nothing(p) for _, p in items):
        demand(isinstance(t, Py) or t is None or (isinstance(t, list) and positions and len(t) == len(items)))
    found = []
    for k, p in items:
        given = None if takes_nothing(p) or t is None else part(t, k)
        found.append((k, given is None, *meaning(p, given)))
    return [out for *_, out, _ in found], lambda x: tuple(
        f(None if nothing else x[k]) for k, nothing, _, f in found
    )


def part(t: Type, k: Any) -> Type:
    """The type of an item of a tuple or a Python object."""
    if isinstance(t, list):
        return t[k]
    known = isinstance(t.hint, (dict, tuple)) and (
        not isinstance(t.hint, tuple) or -len(t.hint) <= k < len(t.hint)
    )
    return Py(t.hint[k]) if known else element(t)


def all_of(t: Type, *ps: Any) -> Meaning:
    found = [meaning(p, t) for p in ps]
    return [out for out, _ in found], lambda x: tuple(f(x) for _, f in found)


def item(t: Type, k: int) -> Meaning:
    demand(isinstance(t, (Py, list, Seq)))
    if isinstance(t, list):
        demand(-len(t) <= k < len(t))
    return element(t) if isinstance(t, Seq) else part(t, k), lambda x: x[k]


def sliced(t: Type, start: Any, stop: Any, step: Any) -> Meaning:
    demand(isinstance(t, (Py, list, Seq)))
    s = slice(start, stop, step)
    if isinstance(t, Py):
        return Py(t.hint[s] if isinstance(t.hint, tuple) else t.hint), lambda x: x[s]
    return t[s] if isinstance(t, list) else t, lambda x: x[s]


def length(t: Type) -> Meaning:
    demand(isinstance(t, (Py, list, Seq)))
    return Tensor(), lambda x: torch.tensor(float(len(x)), dtype=torch.float64)


def concat(t: Type) -> Meaning:
    demand(isinstance(t, list) and t and all(isinstance(x, Tensor) for x in t))
    shapes = [x.shape or (1,) for x in t]
    demand(all(x.dtype == t[0].dtype for x in t) and all(s[1:] == shapes[0][1:] for s in shapes))
    out = Tensor((sum(s[0] for s in shapes), *shapes[0][1:]), t[0].dtype)
    return out, lambda x: torch.cat([y.reshape(s) for y, s in zip(x, shapes, strict=True)])


def mapped(t: Type, p: Any) -> Meaning:
    out, f = meaning(p, element(t))
    if isinstance(t, Rep):
        return Rep(out), lambda x: Endless(f(x.item))
    return Seq(out), lambda x: [f(e) for e in x]


def folded(t: Type, p: Any, start: Any) -> Meaning:
    demand(not isinstance(t, Rep))
    a, begin = meaning(start, None)
    out, f = meaning(p, canonical([a, element(t)]))
    demand(out == a)

    def run(x: Any) -> Any:
        state = begin(None)
        for e in x:
            state = f((state, e))
        return state

    return a, run


def rnn(t: Type, p: Any, start: Any) -> Meaning:
    demand(not isinstance(t, Rep))
    s, begin = meaning(start, None)
    out, f = meaning(p, canonical([element(t), s]))
    demand(isinstance(out, list) and len(out) == 2 and out[1] == s)

    def run(x: Any) -> Any:
        state, outputs = begin(None), []
        for e in x:
            y, state = f((e, state))
            outputs.append(y)
        return outputs, state

    return [canonical(Seq(out[0])), s], run


def reduced(t: Type, p: Any, default: Any) -> Meaning:
    demand(isinstance(t, (Seq, list)))
    e = element(t)
    out, f = meaning(p, canonical([e, e]))
    demand(out == e)
    if default is not None:
        kind, begin = meaning(default, None)
        demand(kind == e)
    else:
        zero(e)

    def run(x: Any) -> Any:
        if not x:
            return zero(e) if default is None else begin(None)
        x = list(x)
        while len(x) > 1:
            x = [f((x[i], x[i + 1])) if i + 1 < len(x) else x[i] for i in range(0, len(x), 2)]
        return x[0]

    return e, run


def statistic(t: Type, name: str) -> Meaning:
    demand(isinstance(t, (Seq, list)))
    e = element(t)
    demand(isinstance(e, Tensor) and (name != "mean" or e.dtype == "float64"))
    f = {"sum": torch.sum, "min": torch.amin, "max": torch.amax, "mean": torch.mean}[name]
    return e, lambda x: f(torch.stack(list(x)), 0).to(getattr(torch, e.dtype)) if x else zero(e)


def broadcast(t: Type) -> Meaning:
    demand(not isinstance(t, Py))
    return Rep(t), Endless


def zipped(t: Type) -> Meaning:
    if isinstance(t, Py):
        return Py(), lambda x: list(zip(*x, strict=False))
    demand(isinstance(t, list) and t and all(isinstance(x, (Seq, Rep, Py)) for x in t))
    out = canonical([element(x) for x in t])
    if all(isinstance(x, Rep) for x in t):
        return Rep(out), lambda x: Endless(tuple(y.item for y in x))

    def run(x: Any) -> Any:
        n = min(len(y) for y in x if not isinstance(y, Endless))
        return [tuple(y.item if isinstance(y, Endless) else y[i] for y in x) for i in range(n)]

    return Seq(out), run


def ngrams(t: Type, n: int) -> Meaning:
    if isinstance(t, Py):
        return Py(), lambda x: list(zip(*[x[i:] for i in range(n)], strict=False))
    out = [element(t)] * n
    if isinstance(t, Rep):
        return Rep(out), lambda x: Endless((x.item,) * n)
    return Seq(out), lambda x: [tuple(x[i : i + n]) for i in range(len(x) - n + 1)]


def one_of(t: Type, *ps: Any) -> Meaning:
    """By the number of digits and characters of a Python object, cyclically."""
    demand(isinstance(t, Py))
    found = [meaning(p, t) for p in ps]
    demand(all(out == found[0][0] for out, _ in found))
    return found[0][0], lambda x: found[choice(x, len(found))][1](x)


def choice(x: Any, n: int) -> int:
    return len(str(x)) % n


def optional(t: Type, p: Any) -> Meaning:
    demand(isinstance(t, Py))
    hint = t.hint[1] if isinstance(t.hint, tuple) and t.hint[:1] == ("maybe",) else t.hint
    out, f = meaning(p, Py(hint))
    zero(out)
    return out, lambda x: zero(out) if x is None else f(x)


def linear(t: Type, weight: torch.Tensor) -> Meaning:
    demand(t == Tensor((weight.shape[1],)))
    return Tensor((weight.shape[0],)), lambda x: weight @ x


def tree(t: Type, leaf: Any, pair: Any) -> Meaning:
    """Recursion: a leaf for a number, a pair of the two values for a pair of trees."""
    demand(isinstance(t, Py))
    out, f = meaning(leaf, Py("number"))
    made, g = meaning(pair, canonical([out, out]))
    demand(made == out)

    def run(x: Any) -> Any:
        return g((run(x[0]), run(x[1]))) if isinstance(x, tuple) else f(x)

    return out, run


def graph(t: Type, *nodes: tuple[Any, tuple[int, ...]]) -> Meaning:
    """Nodes (program, what it reads): 0 is the input, k the k-th node; the output is that of the last."""
    types, runs = [t], []
    for p, reads in nodes:
        given = types[reads[0]] if len(reads) == 1 else canonical([types[r] for r in reads])
        out, f = meaning(p, given)
        types.append(out)
        runs.append((f, reads))

    order: list[int] = []

    def visit(k: int) -> None:
        """Blocks run as the output reads them, depth first."""
        if k > 0 and k not in order:
            for r in runs[k - 1][1]:
                visit(r)
            order.append(k)

    visit(len(runs))

    def run(x: Any) -> Any:
        values = {0: x}
        for k in order:
            f, reads = runs[k - 1]
            values[k] = f(values[reads[0]] if len(reads) == 1 else tuple(values[r] for r in reads))
        return values[len(runs)]

    return types[-1], run


def embedding(t: Type, table: torch.Tensor) -> Meaning:
    demand(t == Tensor((), "int64"))
    return Tensor((table.shape[1],)), lambda x: table[int(x) % table.shape[0]]


def layer(t: Type, weight: torch.Tensor) -> Meaning:
    """A fully connected layer with tanh, its bias being zero."""
    out, f = linear(t, weight)
    return out, lambda x: f(x).tanh()


def listed(t: Type, n: int) -> Meaning:
    """One of the first n even numbers as a one-hot vector, zeros for others."""
    demand(isinstance(t, Py))
    return Tensor((n,)), lambda x: torch.tensor([float(2 * i == x) for i in range(n)], dtype=torch.float64)


METRICS: dict[str, Tensor] = {}  # the metrics of the program that is read: name -> type of a value
SEEN: list[tuple[str, torch.Tensor]] = []  # what they have seen: name, value


def metric(t: Type, name: str) -> Meaning:
    demand(isinstance(t, Tensor) and METRICS.setdefault(name, t) == t)
    return None, lambda x: SEEN.append((name, x))


def nth(t: Type) -> Meaning:
    if isinstance(t, Py):
        return Py(), lambda x: x[0][x[1]]
    demand(isinstance(t, list) and len(t) == 2 and isinstance(t[0], Seq) and isinstance(t[1], Py))
    return t[0].of, lambda x: x[0][x[1]]


def const(t: Type, value: torch.Tensor) -> Meaning:
    return Tensor(tuple(value.shape)), lambda x: value


FORMS: dict[str, Callable[..., Meaning]] = {
    "scalar": scalar, "one_hot": one_hot, "transform": transform, "apply": apply, "pipe": pipe, "record": record,
    "all_of": all_of, "item": item, "slice": sliced, "length": length, "concat": concat, "map": mapped, "fold": folded,
    "rnn": rnn, "reduce": reduced, "statistic": statistic, "broadcast": broadcast, "zip": zipped, "ngrams": ngrams,
    "one_of": one_of, "optional": optional, "linear": linear, "tree": tree, "graph": graph, "const": const, "nth": nth,
    "embedding": embedding, "layer": layer, "listed": listed, "metric": metric,
    "identity": lambda t: (t, lambda x: x), "void": lambda t: (None, lambda x: None),
    "zeros": lambda t, out: (out, lambda x: zero(out)),
}  # fmt: skip


def size(t: Type) -> float:
    """How deep a type is, to keep random programs small."""
    if isinstance(t, list):
        return 1 + sum(map(size, t))
    return (
        1 + size(t.of)
        if isinstance(t, (Seq, Rep))
        else math.prod(t.shape) / 8
        if isinstance(t, Tensor)
        else 0
    )
