"""Random programs of all blocks against `reference.py`: types, values, gradients, and what is refused."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import nn

import fxbatch.blocks as fb

from . import reference as ref
from .reference import Py, Refused, Rep, Seq, Tensor, meaning

NUMBER = Tensor()
FAILED = object()


class Linear(nn.Module):
    """A matrix times a vector, of a parameter that others hold too."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight @ x


# -- programs -----------------------------------------------------------------------------------------


class Writer:
    """Draws programs that have a meaning for the types they meet; now and then one that has none."""

    def __init__(self, seed: int, wrong: float) -> None:
        self.draw = random.Random(seed)
        ref.METRICS.clear()
        self.wrong = wrong
        generator = torch.Generator().manual_seed(seed)
        self.vectors = [
            nn.Parameter(torch.randn(n, generator=generator, dtype=torch.float64)) for n in (1, 2, 3)
        ]
        self.matrices = [
            nn.Parameter(torch.randn(n, m, generator=generator, dtype=torch.float64) / 2)
            for n, m in itertools.product((1, 2, 3), (1, 2, 3, 4, 6))
        ]

    @property
    def parameters(self) -> list[nn.Parameter]:
        return [*self.vectors, *self.matrices]

    def program(self, t: Any, depth: int) -> Any:
        """A program for an input of type t."""
        for _ in range(20):
            found = self.form(t, depth)
            if self.draw.random() < self.wrong:
                return found
            try:
                out, _ = meaning(found, t)
            except Refused:
                continue
            if ref.size(out) > 12:
                continue
            if depth > 0 and self.draw.random() < 0.75:
                return ("pipe", found, self.program(out, depth - 1))
            return found
        return ("identity",)

    def form(self, t: Any, depth: int) -> Any:
        forms = [*self.of_type(t, depth), *self.for_all(t, depth)]
        if self.draw.random() < self.wrong:
            others = [
                NUMBER,
                Tensor((2,)),
                Seq(NUMBER),
                [NUMBER, Tensor((2,))],
                Rep(NUMBER),
                Py("number"),
                Py(["number"]),
            ]
            wrong = [
                ("apply", "neg"),
                ("concat",),
                ("statistic", "sum"),
                ("reduce", ("apply", "add"), None),
                ("broadcast",),
            ]
            if isinstance(t, Py):  # forms of other objects would be errors of instances, not of types
                return self.draw.choice(
                    [*wrong, ("fold", ("item", 0), ("scalar",)), ("rnn", ("apply", "step"), ("scalar",))]
                )
            forms = self.of_type(self.draw.choice(others), depth)
        return self.draw.choice(forms)()

    def some(self, t: Any, depth: int) -> Any:
        return self.program(t, depth - 1) if depth > 0 else ("identity",)

    def for_all(self, t: Any, depth: int) -> list[Any]:
        one = lambda: self.some(t, depth)  # noqa: E731
        return [
            lambda: ("identity",),
            lambda: ("all_of", *[one() for _ in range(self.draw.randint(1, 3))]),
            lambda: ("all_of", one(), ("pipe", ("void",), ("const", self.vector()))),
            lambda: ("all_of", one(), self.draw.choice([("void",), ("const", self.vector()), ("zeros", [NUMBER])])),
            lambda: self.graph(t, depth),
            lambda: ("pipe", ("all_of", one(), one()), self.draw.choice([("item", -1), ("slice", 1, None, None)])),
        ]  # fmt: skip

    def of_type(self, t: Any, depth: int) -> list[Any]:
        d = self.draw
        inner = lambda x: self.some(x, depth)  # noqa: E731
        apply = lambda *names: lambda: ("apply", d.choice(names))  # noqa: E731
        steps, zipped = [None, -1], ("zip",)
        if isinstance(t, Py):
            return self.of_object(t, depth)
        if isinstance(t, Tensor):
            into = [
                (form, w) for form in ("linear", "layer") for w in self.matrices if t == Tensor((w.shape[1],))
            ]
            into += [("embedding", w) for w in self.matrices if t == Tensor((), "int64")]
            seen = ("metric", f"{t.dtype}{list(t.shape)}")
            watched = ("pipe", ("all_of", seen, ("identity",)), ("item", 1))
            return [
                apply("neg", "tanh", "total", "pair"), lambda: ("broadcast",), lambda: d.choice([seen, watched]),
                *([lambda: d.choice(into)] * 2 if into else []),
            ]  # fmt: skip
        if isinstance(t, list):
            return [
                lambda: ("item", d.randint(-len(t), len(t) - 1)) if t else ("identity",),
                lambda: ("slice", d.choice([None, 1, -2]), d.choice([None, 2, -1]), d.choice([None, -1, 2])),
                lambda: ("concat",), lambda: ("length",), lambda: ("zip",), apply("add", "sub", "mul", "step", "first"),
                lambda: ("record", *[(i, inner(x)) for i, x in enumerate(t)]),
                *([] if not t else self.of_elements(t[0], depth)),
            ]  # fmt: skip
        if isinstance(t, Seq):
            return [
                lambda: ("item", d.choice([0, -1, 1])), lambda: ("slice", d.choice([None, 1]), None, d.choice(steps)),
                lambda: ("length",), lambda: ("ngrams", d.randint(1, 3)), *self.of_elements(t.of, depth),
                lambda: ("pipe", ("all_of", ("identity",), ("identity",)), zipped),
                lambda: ("pipe", ("all_of", ("identity",), ("pipe", ("const", self.vector()), ("broadcast",))), zipped),
            ]  # fmt: skip
        if isinstance(t, Rep):
            return [
                lambda: ("map", inner(t.of)), lambda: ("ngrams", 2),
                lambda: ("pipe", ("all_of", ("identity",), ("identity",)), ("zip",)),
            ]  # fmt: skip
        return [lambda: ("identity",)]

    def of_elements(self, e: Any, depth: int) -> list[Any]:
        """What goes through elements of type e."""
        d = self.draw
        starts = [("const", self.vector()), ("zeros", NUMBER)]
        cells = [("apply", "sub"), ("apply", "first"), ("item", 0), ("apply", "mul")]
        if isinstance(e, Tensor) and len(e.shape) == 1:
            n = e.shape[0]
            starts.append(("zeros", e))
            matrices = [w for w in self.matrices if w.shape[1] == 2 * n and w.shape[0] == n]
            cells += [("pipe", ("concat",), ("linear", w), ("apply", "tanh")) for w in matrices] * 2
        default = d.choice([None, None, ("const", self.vector()), ("scalar",)])
        return [
            lambda: ("map", self.some(e, depth)),
            lambda: ("fold", d.choice(cells), d.choice(starts)),
            lambda: ("fold", self.some([NUMBER, e], depth), ("zeros", NUMBER)),
            lambda: ("rnn", d.choice([("apply", "step"), ("all_of", ("item", 0), ("item", 1))]), d.choice(starts)),
            lambda: ("reduce", d.choice([*cells, ("item", 1), ("apply", "add")]), default),
            lambda: ("statistic", d.choice(["sum", "min", "max", "mean"])),
        ]  # fmt: skip

    def of_object(self, t: Py, depth: int) -> list[Any]:
        d, hint = self.draw, t.hint
        inner = lambda x: self.some(x, depth)  # noqa: E731
        twice = lambda: ("transform", "twice")  # noqa: E731
        zero: Any = ("zeros", NUMBER)
        minus, nth = (
            ("apply", "sub"),
            ("graph", (("item", 0), (0,)), (("nth",), (0,)), (("identity",), (1, 2))),
        )
        if hint == "number":
            return [
                lambda: ("scalar",), lambda: ("scalar",), lambda: ("scalar", "int64"), lambda: ("one_hot", 40), twice,
                lambda: ("listed", 3),
                lambda: ("transform", "plus"), lambda: self.cases(t, depth),
            ]  # fmt: skip
        if hint == "tree":
            pair = ("pipe", ("concat",), ("linear", next(w for w in self.matrices if w.shape == (2, 4))))
            leaf = ("pipe", ("scalar",), ("all_of", ("identity",), ("apply", "neg")), ("concat",))
            return [
                lambda: ("tree", leaf, pair),
                lambda: ("tree", ("scalar",), ("apply", d.choice(["sub", "mul"]))),
            ]
        if isinstance(hint, list):
            return [
                lambda: ("map", inner(Py(hint[0]))), lambda: ("map", self.program(Py(hint[0]), depth)),
                lambda: ("length",), lambda: ("transform", "count"), lambda: ("slice", d.choice([None, 1]), None, None),
                lambda: ("fold", ("pipe", ("record", (0, ("identity",)), (1, inner(Py(hint[0])))), minus), zero),
                lambda: self.cases(t, depth),
                lambda: ("pipe", ("all_of", ("map", inner(Py(hint[0]))), ("transform", "count")), nth),
            ]  # fmt: skip
        if isinstance(hint, dict) or (isinstance(hint, tuple) and hint[:1] != ("maybe",)):
            items = sorted(hint.items()) if isinstance(hint, dict) else list(enumerate(hint))
            k, h = d.choice(items)
            return [
                lambda: ("record", *[(k, self.program(Py(h), depth - 1)) for k, h in items]),
                lambda: ("record", *[(k, inner(Py(h))) for k, h in items]),
                lambda: ("pipe", ("item", k), inner(Py(h))),
            ]
        if isinstance(hint, tuple):
            return [lambda: ("optional", self.program(Py(hint[1]), depth - 1))]
        return [lambda: ("identity",)]

    def cases(self, t: Py, depth: int) -> Any:
        first = self.program(t, depth - 1)
        cases = [first, ("pipe", first, ("identity",))]
        try:
            if meaning(first, t)[0] == NUMBER:
                cases.append(("pipe", first, ("apply", "neg")))
        except Refused:
            pass
        if self.draw.random() < self.wrong:
            cases.append(self.program(t, 0))
        return ("one_of", *cases)

    def graph(self, t: Any, depth: int) -> Any:
        """Up to three blocks that read the input or each other, and one that reads all that is not read yet."""
        types, nodes, unread = [t], [], []
        for i in range(self.draw.randint(1, 3)):
            reads = tuple(self.draw.choice(range(i + 1)) for _ in range(self.draw.choice([1, 1, 2])))
            given = types[reads[0]] if len(reads) == 1 else ref.canonical([types[r] for r in reads])
            node = self.some(given, depth - 1)
            try:
                out, _ = meaning(node, given)
            except Refused:
                out = None
            types.append(out)
            nodes.append((node, reads))
            unread = [k for k in unread if k not in reads] + [i + 1]
        return ("graph", *nodes, (("identity",), tuple(unread)))

    def vector(self) -> nn.Parameter:
        return self.draw.choice(self.vectors)

    def instance(self, hint: Any) -> Any:
        """A Python object of this kind."""
        d = self.draw
        if hint == "number":
            return d.randrange(5)
        if hint == "tree":
            return d.randrange(5) if d.random() < 0.55 else (self.instance("tree"), self.instance("tree"))
        if isinstance(hint, list):
            return [self.instance(hint[0]) for _ in range(d.choice([0, 1, 2, 3, 5, 9]))]
        if isinstance(hint, dict):
            return {k: self.instance(h) for k, h in hint.items()}
        if hint[:1] == ("maybe",):
            return None if d.random() < 0.4 else self.instance(hint[1])
        return tuple(self.instance(h) for h in hint)


HINTS = (
    ["number"], ["number"], [["number"]], ("number", ["number"]), {"b": "number", "a": ["number"]}, "tree", ["tree"],
    ("maybe", ["number"]), [("number", "number")], ([{"x": "number"}], "number"), (["number"], ["number"]), "number",
)  # fmt: skip


# -- as blocks ----------------------------------------------------------------------------------------


def to_type(t: Any) -> Any:
    if isinstance(t, list):
        return fb.TupleType([to_type(x) for x in t])
    if isinstance(t, Seq):
        return fb.SequenceType(to_type(t.of))
    if isinstance(t, Rep):
        return fb.BroadcastSequenceType(to_type(t.of))
    return (
        fb.VoidType()
        if t is None
        else fb.PyObjectType()
        if isinstance(t, Py)
        else fb.TensorType(t.shape, t.dtype)
    )


def to_block(p: Any) -> fb.Block:
    form, *args = p
    if form in ("pipe", "all_of", "map", "reduce", "fold", "rnn", "optional"):
        parts = [None if q is None else to_block(q) for q in args]
        kinds = {"pipe": fb.Pipe, "all_of": fb.AllOf, "map": fb.Map, "reduce": fb.Reduce, "fold": fb.Fold}
        return ({"rnn": fb.RNN, "optional": fb.Optional} | kinds)[form](*parts)
    if form == "record":
        positions = [k for k, _ in args] == list(range(len(args)))
        return fb.Record(
            tuple(to_block(q) for _, q in args) if positions else {k: to_block(q) for k, q in args}
        )
    if form == "one_of":
        cases = {str(i): to_block(q) for i, q in enumerate(args)}
        return fb.OneOf(lambda x: str(ref.choice(x, len(args))), cases)
    if form == "graph":
        c = fb.Composition()
        with c.scope():
            values: list[Any] = [c.input]
            for q, reads in args:
                values.append(to_block(q).reads(*[values[r] for r in reads]))
            c.output.reads(values[-1])
        return c
    if form in ("embedding", "layer"):
        (w,) = args
        made: Any = (
            fb.Embedding(*w.shape) if form == "embedding" else fb.FC(w.shape[0], activation=torch.tanh)
        )
        made.double()
        if form == "layer":
            made.set_input_type([w.shape[1], "float64"])
        made.weight = w
        return fb.Function(made)
    if form == "tree":
        fwd = fb.ForwardDeclaration()
        pair = fb.Record((fwd(), fwd())) >> to_block(args[1])
        fwd.resolve_to(fb.OneOf(lambda x: isinstance(x, tuple), {False: to_block(args[0]), True: pair}))
        return fwd()
    simple: dict[str, Any] = {
        "scalar": lambda dtype="float64": fb.Scalar(dtype), "one_hot": lambda n: fb.OneHot(n, dtype="float64"),
        "transform": lambda name: fb.InputTransform(ref.TRANSFORMS[name]), "identity": fb.Identity, "void": fb.Void,
        "apply": lambda name: fb.Function(ref.FUNCTIONS[name]), "linear": lambda w: fb.Function(Linear(w)),
        "item": fb.GetItem, "slice": lambda a, b, c: fb.Slice(start=a, stop=b, step=c), "nth": fb.Nth,
        "length": lambda: fb.Length("float64"), "concat": fb.Concat, "zip": fb.Zip, "ngrams": fb.NGrams,
        "listed": lambda n: fb.OneHotFromList([2 * i for i in range(n)], "float64", strict=False), "metric": fb.Metric,
        "broadcast": fb.Broadcast, "const": fb.FromTensor, "zeros": lambda t: fb.Zeros(to_type(t)),
        "statistic": lambda name: {"sum": fb.Sum, "min": fb.Min, "max": fb.Max, "mean": fb.Mean}[name](),
    }  # fmt: skip
    return simple[form](*args)


# -- comparisons --------------------------------------------------------------------------------------


def same(got: Any, want: Any, t: Any) -> None:
    """Raise AssertionError unless two values of a type are equal to rounding."""
    if isinstance(t, Tensor):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
    elif isinstance(t, list):
        assert type(got) is tuple and len(got) == len(want) == len(t)
        for g, w, x in zip(got, want, t, strict=True):
            same(g, w, x)
    elif isinstance(t, Seq):
        assert type(got) is list and len(got) == len(want)
        for g, w in zip(got, want, strict=True):
            same(g, w, t.of)
    elif isinstance(t, Rep):
        assert isinstance(got, itertools.repeat)
        same(next(got), want.item, t.of)
    else:
        assert got == want and (t is not None or got is None)


def tensors_of(t: Any, x: Any) -> list[torch.Tensor]:
    if isinstance(t, list):
        return [y for item, v in zip(t, x, strict=True) for y in tensors_of(item, v)]
    return [x] if isinstance(t, Tensor) else []


def is_compilable(t: Any) -> bool:
    if isinstance(t, list):
        return all(map(is_compilable, t))
    return t is None or isinstance(t, Tensor)


def run(f: Any, x: Any) -> Any:
    """What f gives, or FAILED for an instance that has not what the program looks for in it."""
    try:
        return f(x)
    except fb.BlockTypeError:
        raise
    except (LookupError, TypeError, ValueError):
        return FAILED


def metrics_seen() -> dict[str, list[torch.Tensor]]:
    """What the metrics of the reference have seen since it was asked last."""
    found: dict[str, list[torch.Tensor]] = {name: [] for name in ref.METRICS}
    for name, value in ref.SEEN:
        found[name].append(value)
    ref.SEEN.clear()
    return found


def same_metrics(got: dict[str, torch.Tensor], want: dict[str, list[torch.Tensor]]) -> None:
    assert list(got) == sorted(want)
    for name, values in want.items():
        assert len(got[name]) == len(values)
        for g, w in zip(got[name], values, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-10)


def check(seed: int, *, wrong: float, compiled: bool) -> str:
    """Compare one random program; what became of it: refused, evaluated, compiled."""
    writer = Writer(seed, wrong)
    hint = writer.draw.choice(HINTS)
    program = writer.program(Py(hint), 3)
    data = [writer.instance(hint) for _ in range(4)]
    ref.METRICS.clear()
    ref.SEEN.clear()
    try:
        t, reference = meaning(program, Py(hint))
    except Refused:
        with pytest.raises(fb.BlockTypeError):
            block = to_block(program)
            block.eval(data[0])
        return "refused"
    block = to_block(program)
    wants, metrics = [], []
    for x in data:
        wants.append(run(reference, x))
        metrics.append(metrics_seen())
    for x, want, seen in zip(data, wants, metrics, strict=True):
        got = run(block.eval, x)
        assert block.output_type == to_type(t)
        if want is FAILED or got is FAILED:
            assert got is want
            continue
        if seen:
            got, numbers = got
            same_metrics(numbers, seen)
        same(got, want, t)
    if not is_compilable(t) or not (ref.METRICS or ref.leaves(t)):
        with pytest.raises(fb.BlockTypeError, match="compiled block"):
            fb.compile(block)
        return "evaluated"
    if not compiled or any(w is FAILED for w in wants):
        return "evaluated"
    compare_compiled(block, writer, data, t, wants, metrics)
    return "compiled"


def compare_compiled(
    block: fb.Block, writer: Writer, data: list[Any], t: Any, wants: list[Any], metrics: list[Any]
) -> None:
    """A minibatch of the compiled block against the reference, one instance at a time: values and gradients."""
    result = fb.compile(block)(data)
    leaves, expected = [], []
    if ref.METRICS:
        result, numbers = result
        seen = {name: [v for m in metrics for v in m[name]] for name in ref.METRICS}
        same_metrics(numbers, seen)
        leaves += [numbers[name] for name in seen if seen[name]]
        expected += [torch.stack(values) for values in seen.values() if values]
    leaves += tensors_of(t, result)
    expected += [torch.stack(column) for column in zip(*[tensors_of(t, w) for w in wants], strict=True)]
    for g, w in zip(leaves, expected, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-10, atol=1e-10)
    totals = [
        sum((x.tanh().sum() for x in xs if x.requires_grad), torch.zeros(())) for xs in (leaves, expected)
    ]
    assert totals[0].requires_grad == totals[1].requires_grad
    if totals[1].requires_grad:
        parameters = writer.parameters
        grads = [
            torch.autograd.grad(y, parameters, allow_unused=True, materialize_grads=True) for y in totals
        ]
        for g, w in zip(*grads, strict=True):
            torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("part", range(4))
def test_types_values_and_refusals(part: int) -> None:
    found = [check(seed, wrong=0.2, compiled=False) for seed in range(100 * part, 100 * part + 100)]
    assert found.count("refused") >= 10 and found.count("evaluated") >= 50


@pytest.mark.parametrize("part", range(3))
def test_compiled_values_and_gradients(part: int) -> None:
    seeds = range(20_000 + 20 * part, 20_020 + 20 * part)
    assert [check(seed, wrong=0.0, compiled=True) for seed in seeds].count("compiled") >= 3


def test_the_comparison_sees_wrong_programs() -> None:
    """A reference with another order of Reduce, or another type of Map, disagrees somewhere."""
    program = ("pipe", ("map", ("scalar",)), ("reduce", ("apply", "sub"), None))
    t, f = meaning(program, Py(["number"]))
    block = fb.Map(fb.Scalar("float64")) >> fb.Fold(fb.Function(torch.sub), fb.Zeros("float64"))
    with pytest.raises(AssertionError):
        same(block.eval([1, 2, 3]), f([1, 2, 3]), t)
    with pytest.raises(AssertionError):
        same((1.0,), [1.0], Seq(Py()))
    with pytest.raises(Refused):
        meaning(("pipe", ("scalar",), ("scalar",)), Py("number"))
